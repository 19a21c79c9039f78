"""Window: limits how far rollouts run ahead of the trainer. No other module knows whether a run is synchronous."""

from __future__ import annotations

import asyncio
import math

from sparring.errors import refusal
from sparring.rollout.config import RolloutConfig


class Window:
    """Admission control by steps: group g belongs to step g // groups_per_step + 1, and may start once all steps before
    its own, except the last `max_lag` of them, are released.

    So a group of step s starts on the weights of version s - 1 - max_lag or newer: its lag when trained is at most
    `max_lag`, by construction (law 5). `max_lag = 0` is a synchronous run.

    Args:
        groups_per_step: number of groups of one optimiser step, at least 1.
        max_lag: maximum lag of a group in optimiser steps, at least 0.
        total_steps: number of steps for which groups are admitted; None admits groups without end.
    """

    def __init__(self, groups_per_step: int, max_lag: int, total_steps: int | None = None) -> None:
        if groups_per_step < 1 or max_lag < 0:
            raise ValueError("groups_per_step must be at least 1 and max_lag at least 0")
        self.groups_per_step = groups_per_step
        self.max_lag = max_lag
        self.total_steps = total_steps
        self._released = 0
        self._next = 0
        self._opened = asyncio.Event()

    @property
    def next_index(self) -> int:
        """Index of the group that is admitted next."""
        return self._next

    @property
    def released_steps(self) -> int:
        """Number of finished steps whose weights the engine serves or has served."""
        return self._released

    async def acquire(self) -> int | None:
        """Return the index of the next group once it may start, or None after the last one. Only one task may call this
        method at a time."""
        if self.total_steps is not None and self._next >= self.total_steps * self.groups_per_step:
            return None
        while self._next // self.groups_per_step > self._released + self.max_lag:
            self._opened.clear()
            await self._opened.wait()
        self._next += 1
        return self._next - 1

    async def reached(self, step: int) -> None:
        """Wait until `step` is released."""
        while self._released < step:
            self._opened.clear()
            await self._opened.wait()

    def release(self, step: int) -> None:
        """Admit the groups that may start on the weights of `step` (counted from 1), which the engine now serves. A
        second call for the same step, by a second model, has no effect. Raises ValueError if a step was left out, or
        came out of order."""
        if step not in (self._released, self._released + 1):
            raise ValueError(f"step {step} cannot be released after step {self._released}")
        self._released = step
        self._opened.set()

    def resume(self, at_step: int) -> None:
        """Set the window to its state after `at_step` steps: the next group is the first of the following step. Raises
        ValueError if a group was admitted already."""
        if self._next != self._released * self.groups_per_step:
            raise ValueError("a window can only be resumed before its first admission")
        self._released = at_step
        self._next = at_step * self.groups_per_step


def check_window(
    config: RolloutConfig,
    *,
    groups_per_step: int,
    engine_tokens: int | None = None,
    rollout_tokens: int | None = None,
) -> None:
    """Prove that the rollouts of a run cannot wait for each other in a circle, or refuse the config.

    The proof. A step is *open* while groups of it are missing.

    (1) The window admits groups in order of index, and always admits the groups of the open step: their step number
    minus 1 equals the number of released steps, and `max_lag` is at least 0.

    (2) Places for rollouts are given out in admission order and given back only at a rollout's end. So rollouts of the
    open step wait at most for rollouts that were admitted before them, and these are all running. The number of places
    follows the engine's load but is at least one, and evaluation has places of its own.

    (3) A running rollout is always in a phase: box, open, turn, tool, score, close, or in its harness between two
    phases. Every phase has a time limit that does not depend on the part it waits for. An environment's code runs on a
    thread of its own and is abandoned if it blocks or ignores cancellation. A second scoring pass has a limit, too. The
    phase `box queue` has no limit, but its places are given out in order, and each is given back within
    `timeouts.box_s`. The engine can always run its oldest request if one whole rollout fits into its cache, because it
    may evict every other conversation, so turns end without their limit. Two things are trusted not to block: a
    harness, and code that holds the interpreter's lock.

    (4) So every running rollout ends, the open step fills, and the trainer, which waits for nothing else, releases it.
    The proof needs at least one place, finite limits, and an engine that one rollout fits into; these are checked.

    Args:
        engine_tokens: number of tokens that the engine's cache holds; None if it has no bound.
        rollout_tokens: longest context of one rollout; None if it is not known yet.

    Raises:
        BadInput: the run could wait for ever.
    """
    if groups_per_step < 1:
        raise refusal("rl.groups_per_step", "at least 1", str(groups_per_step), "raise it")
    timeouts = config.timeouts
    limits = {f"timeouts.{name}": getattr(timeouts, name) for name in timeouts.__struct_fields__ if name != "stalled_s"}
    for name, limit in {"limits.timeout_s": config.limits.timeout_s, **limits}.items():
        if limit == math.inf:
            raise refusal(f"rollout.{name}", "a finite time", "inf", "set one: a wait without an end can stop the run")
    if engine_tokens is not None and rollout_tokens is not None and rollout_tokens > engine_tokens:
        raise refusal(
            "engine",
            f"a cache of at least {rollout_tokens} tokens, the longest context of one rollout",
            f"{engine_tokens} tokens",
            "raise the engine's cache or lower the context length",
        )
