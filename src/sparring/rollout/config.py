"""The `[rollout]` section of a recipe, with a table for each of its topics."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from sparring.generation import TEMPERATURE, Constraint, Sampling, is_temperature
from sparring.types import POLICY, Limits


class ConstraintConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Constraint on the text of every reply."""

    kind: Literal["json_schema", "regex", "lark"]
    """Kind of the text: JSON that fits a schema, a full match of a regular expression, or a text of a Lark grammar."""

    source: str
    """Schema in JSON, regular expression, or grammar."""


class SamplingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sampling of each turn."""

    temperature: float = 1.0
    """Sampling temperature; 0 is greedy."""

    top_p: float = 1.0
    """Probability of the smallest set of tokens to sample from (nucleus); 1 truncates nothing."""

    top_k: int = 0
    """Number of most likely tokens to sample from; 0 truncates nothing."""

    min_p: float = 0.0
    """Minimum probability of a token relative to the most likely one; 0 truncates nothing."""

    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs of a token's id and a number that is added to its logit before all other processing."""

    max_turn_tokens: int = 256
    """Maximum number of sampled tokens in one turn."""

    min_turn_tokens: int = 0
    """Minimum number of tokens in a turn, before which no token that ends the turn is sampled."""

    stop_strings: tuple[str, ...] = ()
    """Strings that end a turn: it ends with the token that completes a string, in addition to the format's stop
    tokens."""

    constraint: ConstraintConfig | None = None
    """Constraint on the text of every reply, also of a reply that calls tools. An environment may set another one with
    an observation."""

    def __post_init__(self) -> None:
        if (
            not is_temperature(self.temperature)
            or not 0 < self.top_p <= 1
            or self.top_k < 0
            or not 0 <= self.min_p <= 1
        ):
            raise ValueError(f"{TEMPERATURE}, 0 < top_p <= 1, top_k >= 0 and 0 <= min_p <= 1")
        if self.max_turn_tokens < 1:
            raise ValueError("max_turn_tokens must be at least 1")
        if not 0 <= self.min_turn_tokens <= self.max_turn_tokens:
            raise ValueError("min_turn_tokens must be from 0 to max_turn_tokens")
        if not all(self.stop_strings):
            raise ValueError("stop_strings must not be empty texts")

    def build(self, stop: tuple[int, ...] = ()) -> Sampling:
        """Return the sampling settings of every turn, with the ids of stop tokens. The seed is set per rollout."""
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


class RolloutLimitsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of a rollout, each of which replaces the task's own limit."""

    max_turns: int | None = None
    """Maximum number of turns."""

    max_tokens: int | None = None
    """Maximum number of sampled tokens over all turns."""

    max_tool_calls: int | None = None
    """Maximum number of tool calls."""

    timeout_s: float | None = None
    """Maximum seconds that the policy's own commands (its calls of the environment) may take together. The limit is
    checked after each call; a rollout that exceeds it is truncated."""

    def __post_init__(self) -> None:
        if any(n is not None and n < 1 for n in (self.max_turns, self.max_tokens)):
            raise ValueError("max_turns and max_tokens must be at least 1")
        if self.max_tool_calls is not None and self.max_tool_calls < 0:
            raise ValueError("max_tool_calls must be 0 or more")
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise ValueError("timeout_s must be more than 0")

    def apply(self, task: Limits) -> Limits:
        """Return the task's limits, with the limits that are set here in their place."""
        return Limits(
            max_turns=task.max_turns if self.max_turns is None else self.max_turns,
            max_tokens=task.max_tokens if self.max_tokens is None else self.max_tokens,
            max_tool_calls=task.max_tool_calls if self.max_tool_calls is None else self.max_tool_calls,
            timeout_s=task.timeout_s if self.timeout_s is None else self.timeout_s,
        )


class TimeoutsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Time limits of the infrastructure around a rollout."""

    box_s: float = 120.0
    """Maximum seconds to open a box."""

    open_s: float = 300.0
    """Maximum seconds to make and open an environment."""

    turn_s: float = 3600.0
    """Maximum seconds for one reply, with queueing, sampling and weight updates."""

    tool_s: float = 600.0
    """Maximum seconds for one call of the environment, and for a harness between two requests."""

    score_s: float = 120.0
    """Maximum seconds to score one rollout, and for each scorer of a second pass over its group. A failed scoring is
    retried up to `rollout.retries.rebuilds` times."""

    close_s: float = 30.0
    """Maximum seconds to close each of environment, box and conversation; a slower part is abandoned."""

    stalled_s: float = 60.0
    """Seconds without a finished rollout after which a stall is reported, with its cause."""

    def __post_init__(self) -> None:
        names = self.__struct_fields__
        if min(getattr(self, name) for name in names) <= 0:
            raise ValueError(f"{', '.join(names)} must be more than 0")


class RetriesConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Retries of rollouts and groups that the infrastructure broke."""

    rebuilds: int = 3
    """Maximum number of consecutive rebuilds of a rollout that the infrastructure broke. A rebuild that gets further
    than before starts a new count. With fewer than 3, no failure of an environment counts as the policy's."""

    groups: int = 2
    """Maximum number of new groups for a task after the infrastructure broke its whole group."""

    delay_s: float = 0.5
    """Maximum pause in seconds before the first rebuild; doubles with each. The pause is drawn uniformly below the
    maximum by the rollout's seed (full jitter)."""

    outage_s: float = 600.0
    """Maximum seconds of an outage of an environment's infrastructure. During an outage, one rollout at a time probes
    the environment and no other begins. After this time the run ends, and it can be resumed."""

    def __post_init__(self) -> None:
        if min(self.rebuilds, self.groups, self.delay_s, self.outage_s) < 0:
            raise ValueError("rebuilds, groups, delay_s and outage_s must be 0 or more")


class RewardsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rewards from outside, and the reward of a failure of the policy."""

    within_s: float | None = None
    """Seconds after the harness's end within which the final reward of a rollout must arrive from outside (`POST
    /v1/rewards`), for rollouts that were given a key of the gateway. That reward replaces the environment's, and a
    rollout without it is not scored. Unset: the environment alone scores, and rewards from outside are refused."""

    under: Literal["reward_key", "any_key"] = "reward_key"
    """Keys that are accepted for rewards from outside. `any_key` accepts, besides the rollout's reward key and the
    run's, also the key that the rollout samples with; the policy's own commands may know that key."""

    policy_failure: float = 0.0
    """Reward of a rollout in which the policy broke the world, so that nothing can be scored."""

    def __post_init__(self) -> None:
        if self.within_s is not None and not 0 <= self.within_s < math.inf:
            raise ValueError("within_s must be 0 or more, in seconds")


class GatewayConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Addresses and lease time for programs outside the run, including workers."""

    url: str = ""
    """Address of `sparring gateway`, such as `http://10.0.0.5:9000`, that programs use instead of the run's own server
    (docs/path/gateway.md). Empty: the run's process serves them."""

    listen: str = "127.0.0.1:0"
    """Address, `HOST:PORT`, of the run's server for workers and for senders of rewards. Port 0 takes a free one. The
    run writes address and keys into `keys.json` in its folder."""

    lease_s: float = 60.0
    """Seconds without a request after which a worker loses its rollout to another worker."""

    shown_to_workers: tuple[str, ...] = ()
    """Fields of a task's data that its worker gets with the prompt and the tools, such as `["repository"]`. It gets no
    other field, so no answers."""

    def __post_init__(self) -> None:
        host, _, port = self.listen.rpartition(":")
        if not host or not port.isdecimal() or int(port) > 65535:
            raise ValueError(f"listen must be HOST:PORT, such as 0.0.0.0:9100, got {self.listen!r}")
        if not 1 <= self.lease_s < math.inf:
            raise ValueError("lease_s must be 1 or more, in seconds")


class RolloutConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of rollouts: tasks become scored groups."""

    harness: str = "chat"
    """Harness that holds the conversation. `chat` alternates the world's messages and the policy's replies.
    `package.module:name` or `path/to/file.py:name` is a coroutine function `async def name(episode)`, or a class with
    such a method `run`. The name of a preset, such as `claude-code`, or `path/to/preset.toml` is an agent program in
    the rollout's box (docs/agents.md). `workers` are programs elsewhere that claim rollouts by HTTP
    (docs/path/workers.md)."""

    programs: str = ".harnesses"
    """Folder whose npm `node_modules` and virtual environment `venv` are searched for agent programs before PATH."""

    models: dict[str, Literal["policy", "auxiliary"]] = {}
    """Other names under which an agent requests models, each with the model that answers, such as `"gpt-4o" = "policy"`
    or `"*-mini" = "auxiliary"`. Replies of the auxiliary model are recorded and not trained. `*` matches any
    characters. These names take precedence over a preset's."""

    calls_from_code: bool = False
    """Whether to run tool calls that the policy did not write in a reply. An agent program or a worker makes such calls
    when it runs code that its model wrote (docs/agents.md). Each counts as a tool call of the rollout."""

    roles: dict[str, str] = {}
    """Models of the recipe for roles of the environment, such as `{ user = "simulator" }`. The policy speaks for all
    other roles, and only the policy is trained."""

    group_size: int = 8
    """Number of rollouts of one task; their mean reward is the baseline."""

    max_lag: int = 0
    """Maximum lag of a group in optimiser steps when it is trained. 0 is synchronous."""

    max_concurrent_rollouts: int = 128
    """Maximum number of concurrent rollouts. With the native engine, fewer run while its KV cache cannot hold all their
    conversations."""

    sampling: SamplingConfig = SamplingConfig()
    """Sampling of each turn."""

    limits: RolloutLimitsConfig = RolloutLimitsConfig()
    """Limits of a rollout that replace the limits of its task."""

    timeouts: TimeoutsConfig = TimeoutsConfig()
    """Time limits of the infrastructure around a rollout. They do not count the policy's own time: when one is hit, it
    is a failure of the infrastructure, which is retried."""

    retries: RetriesConfig = RetriesConfig()
    """Retries of rollouts and groups that the infrastructure broke."""

    rewards: RewardsConfig = RewardsConfig()
    """Rewards from outside, and the reward of a failure of the policy."""

    gateway: GatewayConfig = GatewayConfig()
    """Addresses and lease time for programs outside the run, including workers."""

    def __post_init__(self) -> None:
        if self.group_size < 1 or self.max_concurrent_rollouts < 1:
            raise ValueError("group_size and max_concurrent_rollouts must be at least 1")
        if self.max_lag < 0:
            raise ValueError("max_lag must be 0 or more")

    def speaks(self, role: str) -> bool:
        """Return whether the policy speaks for a role."""
        return self.roles.get(role, POLICY) == POLICY
