"""The `[rollout]` section of a recipe."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from sparring.generation import TEMPERATURE, Constraint, Sampling, is_temperature
from sparring.types import POLICY, Limits


class ConstraintConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Constraint on the text of every reply."""

    kind: Literal["json_schema", "regex", "lark"]
    """Kind of text: JSON of a schema, a whole match of a regular expression, or a text of a grammar in Lark's
    notation."""

    source: str
    """The schema as JSON, the expression, or the grammar."""


class RolloutConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of rollouts: tasks become scored groups."""

    harness: str = "chat"
    """Holder of the conversation: `chat`, a world's question and its answers turn by turn; or `package.module:name` or
    `path/to/file.py:name`, a coroutine function `async def name(episode)` or a class with such a `run`; or an agent
    program, run in the rollout's box: the name of a preset, such as `claude-code`, or `path/to/preset.toml`
    (docs/agents.md); or `workers`: programs elsewhere that claim rollouts by HTTP (docs/path/workers.md)."""

    programs: str = ".harnesses"
    """Folder in which agent programs are looked for before PATH: `node_modules` of npm and `venv`, a virtual
    environment."""

    models: dict[str, Literal["policy", "auxiliary"]] = {}
    """Other names that an agent has for models, each with what answers to it, such as `"gpt-4o" = "policy"` or
    `"*-mini" = "auxiliary"`: what is said as the auxiliary model is recorded and not trained. `*` stands for any
    letters. They go before those of a preset."""

    calls_from_code: bool = False
    """True lets calls of the world's tools run that stand in no reply, for an agent program or a worker whose model
    writes code which calls them (docs/agents.md). Each counts as a tool call of the rollout."""

    gateway: str = ""
    """Address of `sparring gateway`, such as `http://10.0.0.5:9000`, that programs get in the place of the run's own
    server (docs/path/gateway.md). Empty: the run's process answers them."""

    listen: str = "127.0.0.1:0"
    """Address, `HOST:PORT`, of the run's server for programs elsewhere: workers, and whoever gives rewards. Port 0
    takes a free one. The run writes address and keys into `keys.json` in its folder."""

    lease_s: float = 60.0
    """Seconds after which a worker that has shown no sign of life loses its rollout, which is given to another."""

    shown_to_workers: tuple[str, ...] = ()
    """Fields of a task's data that its worker is shown beside prompt and tools, such as `["repository"]`. The rest, the
    answers among them, it is not."""

    roles: dict[str, str] = {}
    """Models of the recipe by the role of the environment that they speak for, such as `{ user = "simulator" }`. The
    policy speaks for every other role, and it alone is trained."""

    group_size: int = 8
    """Rollouts of one task; their mean reward is the baseline."""

    max_lag: int = 0
    """Optimiser steps that a group may be behind when it is trained. 0 is synchronous."""

    max_concurrent_rollouts: int = 128
    """Most rollouts in flight. An engine that reports what its requests lost (the native one) has fewer while its cache
    does not hold their conversations together."""

    temperature: float = 1.0
    """Sampling temperature; 0 is greedy."""

    top_p: float = 1.0
    """Smallest set of tokens with this probability; 1 truncates nothing."""

    top_k: int = 0
    """The k most likely tokens; 0 truncates nothing."""

    min_p: float = 0.0
    """Tokens at least this likely relative to the likeliest; 0 truncates nothing."""

    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs of a token's id and what is added to its logit, before everything else."""

    max_turn_tokens: int = 256
    """Sampled tokens in one turn."""

    min_turn_tokens: int = 0
    """Until a turn has this many tokens, none that ends it is sampled."""

    stop_strings: tuple[str, ...] = ()
    """A turn ends with the token that completes one of these in its text, beside the tokens that end a turn anyway."""

    constraint: ConstraintConfig | None = None
    """Constraint on the text of every reply; an environment may ask for another with an observation. A reply that calls
    tools is a text too."""

    max_turns: int | None = None
    """Replaces the task's own limit."""

    max_tokens: int | None = None
    """Sampled tokens over all turns; replaces the task's own limit."""

    max_tool_calls: int | None = None
    """Replaces the task's own limit."""

    timeout_s: float | None = None
    """Seconds that the policy's own commands may take, the calls of one rollout to its environment together; replaces
    the task's own limit. Checked after each call: beyond it the rollout is truncated."""

    box_timeout_s: float = 120.0
    """Longest wait for a box. This limit and those below are never on the policy's clock: one that strikes is a failure
    of the infrastructure, which is retried."""

    open_timeout_s: float = 300.0
    """Longest time in which an environment is made and opened."""

    turn_timeout_s: float = 3600.0
    """Longest wait for one reply: queueing behind other requests, sampling, updates of weights."""

    tool_timeout_s: float = 600.0
    """Longest time of one call to the environment, and longest time in which a harness asks for nothing."""

    score_timeout_s: float = 120.0
    """Longest time of scoring one rollout, and of each second pass over its group. The same conversation is scored
    again up to `retries` times."""

    rewards_within_s: float | None = None
    """Seconds after the harness's end for which a rollout behind a key of the gateway awaits its final reward from
    outside (`POST /v1/rewards`); that reward stands in the place of the environment's, and a rollout without one is not
    scored. Unset: the environment alone scores, and rewards from outside are refused."""

    rewards_under: Literal["reward_key", "any_key"] = "reward_key"
    """Keys under which such rewards are taken: the rollout's own reward key and the run's, or also the one under which
    it samples (`any_key`): whoever has that could give them, the policy's own commands included."""

    close_timeout_s: float = 30.0
    """Longest time in which environment, box and conversation are closed, each; what takes longer is left behind."""

    stalled_s: float = 60.0
    """Seconds without a finished rollout after which one line says what is waited for."""

    retries: int = 3
    """Number of times in a row that a rollout which the infrastructure broke is rebuilt without getting further than
    before. With fewer than 3, no failure of an environment is ever called the policy's."""

    retry_delay_s: float = 0.5
    """Longest pause before the first retry; doubles with each. The pause itself is drawn evenly below it by the seed of
    the rollout, so that many do not knock at the same instant."""

    outage_s: float = 600.0
    """Seconds that an environment's infrastructure may stay down: no rollout begins meanwhile but one at a time that
    tries it, and then the run ends and can be gone on with."""

    task_retries: int = 2
    """Number of times that a task comes again, as a new group, after the infrastructure broke its whole group."""

    policy_failure_reward: float = 0.0
    """Reward of a rollout whose world the policy broke, so that nothing is left to score."""

    def __post_init__(self) -> None:
        if self.group_size < 1 or self.max_concurrent_rollouts < 1 or self.max_turn_tokens < 1:
            raise ValueError("group_size, max_concurrent_rollouts and max_turn_tokens must be at least 1")
        if min(self.max_lag, self.retries, self.retry_delay_s, self.outage_s, self.task_retries) < 0:
            raise ValueError("max_lag, retries, retry_delay_s, outage_s and task_retries must be 0 or more")
        if (
            not is_temperature(self.temperature)
            or not 0 < self.top_p <= 1
            or self.top_k < 0
            or not 0 <= self.min_p <= 1
        ):
            raise ValueError(f"{TEMPERATURE}, 0 < top_p <= 1, top_k >= 0 and 0 <= min_p <= 1")
        if not 0 <= self.min_turn_tokens <= self.max_turn_tokens:
            raise ValueError("min_turn_tokens must be from 0 to max_turn_tokens")
        if not all(self.stop_strings):
            raise ValueError("stop_strings must not be empty texts")
        if min(limit for _, limit in self.time_limits()) <= 0 or self.stalled_s <= 0:
            raise ValueError(f"{', '.join(name for name, _ in self.time_limits())} and stalled_s must be more than 0")
        host, _, port = self.listen.rpartition(":")
        if not host or not port.isdecimal() or int(port) > 65535:
            raise ValueError(f"listen must be HOST:PORT, such as 0.0.0.0:9100, got {self.listen!r}")
        if not 1 <= self.lease_s < math.inf:
            raise ValueError("lease_s must be 1 or more, in seconds")
        if self.rewards_within_s is not None and not 0 <= self.rewards_within_s < math.inf:
            raise ValueError("rewards_within_s must be 0 or more, in seconds")
        if any(n is not None and n < 1 for n in (self.max_turns, self.max_tokens)):
            raise ValueError("max_turns and max_tokens must be at least 1")
        if self.max_tool_calls is not None and self.max_tool_calls < 0:
            raise ValueError("max_tool_calls must be 0 or more")

    def time_limits(self) -> tuple[tuple[str, float], ...]:
        """Return the limits of time that are set, by key, in seconds."""
        keys = ("timeout_s", *(f"{phase}_timeout_s" for phase in ("box", "open", "turn", "tool", "score", "close")))
        return tuple((key, limit) for key in keys if (limit := getattr(self, key)) is not None)

    def sampling(self, stop: tuple[int, ...] = ()) -> Sampling:
        """Return the sampling of every turn. The seed is set per rollout."""
        wanted = self.constraint
        return Sampling(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            max_tokens=self.max_turn_tokens,
            stop=stop,
            min_tokens=self.min_turn_tokens,
            logit_bias=self.logit_bias,
            stop_strings=self.stop_strings,
            constraint=None if wanted is None else Constraint(kind=wanted.kind, source=wanted.source),
        )

    def speaks(self, role: str) -> bool:
        """Return whether the policy speaks for a role."""
        return self.roles.get(role, POLICY) == POLICY

    def limits(self, task: Limits) -> Limits:
        """Return the task's limits with the ones set here in their place."""
        return Limits(
            max_turns=task.max_turns if self.max_turns is None else self.max_turns,
            max_tokens=task.max_tokens if self.max_tokens is None else self.max_tokens,
            max_tool_calls=task.max_tool_calls if self.max_tool_calls is None else self.max_tool_calls,
            timeout_s=task.timeout_s if self.timeout_s is None else self.timeout_s,
        )
