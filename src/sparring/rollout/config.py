"""The `[rollout]` section of a recipe."""

from __future__ import annotations

from typing import Literal

import msgspec

from sparring.generation import TEMPERATURE, Constraint, Sampling, is_temperature
from sparring.types import POLICY, Limits


class ConstraintConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the text of every reply must be."""

    kind: Literal["json_schema", "regex", "lark"]
    """JSON of a schema, what a regular expression matches as a whole, or a text of a grammar in Lark's notation."""

    source: str
    """The schema as JSON, the expression, or the grammar."""


class RolloutConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How tasks become scored groups."""

    harness: str = "chat"
    """Who holds the conversation: `chat`, a world's question and its answers turn by turn; or `package.module:name` or
    `path/to/file.py:name`, a coroutine function `async def name(episode)` or a class with such a `run`."""

    roles: dict[str, str] = {}
    """Models of the recipe by the role of the environment that they speak for, such as `{ user = "simulator" }`. The
    policy speaks for every other role, and it alone is trained."""

    group_size: int = 8
    """Rollouts of one task; their mean reward is the baseline."""

    max_lag: int = 0
    """How many optimiser steps a group may be behind when it is trained. 0 is synchronous."""

    max_concurrent_rollouts: int = 128
    """Rollouts in flight."""

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
    """What the text of every reply must be; an environment may ask for something else with an observation. A reply that
    calls tools is a text too."""

    max_turns: int | None = None
    """Replaces the task's own limit."""

    max_tokens: int | None = None
    """Sampled tokens over all turns; replaces the task's own limit."""

    max_tool_calls: int | None = None
    """Replaces the task's own limit."""

    timeout_s: float | None = None
    """Wall clock of one rollout; replaces the task's own limit."""

    score_timeout_s: float = 120.0
    """Wall clock of scoring one rollout. A scorer that takes longer has failed, not the policy."""

    box_timeout_s: float = 120.0
    """Longest wait for a box. It is not on the policy's clock."""

    retries: int = 2
    """How often a rollout that the infrastructure broke is run again, with the same seed."""

    retry_delay_s: float = 0.5
    """Pause before the first retry; doubles with each."""

    policy_failure_reward: float = 0.0
    """Reward of a rollout whose world the policy broke, so that nothing is left to score."""

    def __post_init__(self) -> None:
        if self.group_size < 1 or self.max_concurrent_rollouts < 1 or self.max_turn_tokens < 1:
            raise ValueError("group_size, max_concurrent_rollouts and max_turn_tokens must be at least 1")
        if self.max_lag < 0 or self.retries < 0 or self.retry_delay_s < 0:
            raise ValueError("max_lag, retries and retry_delay_s must be 0 or more")
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
        if min(self.score_timeout_s, self.box_timeout_s) <= 0 or (self.timeout_s is not None and self.timeout_s <= 0):
            raise ValueError("timeout_s, score_timeout_s and box_timeout_s must be more than 0")
        if any(n is not None and n < 1 for n in (self.max_turns, self.max_tokens)):
            raise ValueError("max_turns and max_tokens must be at least 1")
        if self.max_tool_calls is not None and self.max_tool_calls < 0:
            raise ValueError("max_tool_calls must be 0 or more")

    def sampling(self, stop: tuple[int, ...] = ()) -> Sampling:
        """How every turn is sampled. The seed is set per rollout."""
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
        """The task's limits with the ones set here in their place."""
        return Limits(
            max_turns=task.max_turns if self.max_turns is None else self.max_turns,
            max_tokens=task.max_tokens if self.max_tokens is None else self.max_tokens,
            max_tool_calls=task.max_tool_calls if self.max_tool_calls is None else self.max_tool_calls,
            timeout_s=task.timeout_s if self.timeout_s is None else self.timeout_s,
        )
