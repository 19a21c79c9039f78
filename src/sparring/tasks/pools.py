"""Difficulty pools: tasks that the policy masters, or cannot do at all, come less often."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import xxhash

from sparring.protocols import TaskSource
from sparring.types import Group, Score, Task

MOST_PASSED_OVER = 1000
"""After so many tasks in a row that were passed over, the next one comes whatever its pool."""


class DifficultyPools(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Pools of tasks that may be passed over. A task goes into the pool of its last group: easy, hard, or neither; one
    that was never tried, or of which all members failed for infrastructure reasons, is in none.
    """

    easy_from: float = 1.0
    """Share of members that solved it from which a task is easy."""

    hard_to: float = 0.0
    """Share of members that solved it up to which a task is hard."""

    keep_easy: float = 0.1
    """Probability with which an easy task comes when its turn is there."""

    keep_hard: float = 1.0
    """The same for a hard one."""

    solved_above: float = 0.5
    """A member succeeded when its reward is above this, where the scorer does not say."""

    def __post_init__(self) -> None:
        for name in ("easy_from", "hard_to", "keep_easy", "keep_hard"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must lie between 0 and 1")
        if self.hard_to >= self.easy_from:
            raise ValueError("hard_to must be below easy_from")

    def open(self, source: TaskSource, *, seed: int) -> Pools:
        """Return the source with tasks passed over; `seed` decides which."""
        return Pools(self, source, seed=seed)


class Pools:
    """A source whose easy and hard tasks come less often. Implements `protocols.TaskSource`.

    Whether a task is passed over depends on (seed, how many the source gave) and on its pool, nothing else, so a
    resumed run passes over the same ones.
    """

    def __init__(self, config: DifficultyPools, source: TaskSource, *, seed: int) -> None:
        self._config = config
        self._source = source
        self._seed = seed
        self._drawn = 0
        self._pools: dict[str, str] = {}

    def next(self) -> Task | None:
        """Return the next task that is not passed over; None when the source has ended."""
        for _ in range(MOST_PASSED_OVER):
            task = self._source.next()
            self._drawn += 1
            if task is None or self._comes(task):
                return task
        return self._source.next()

    def observe(self, group: Group) -> None:
        """Put the group's task into its pool."""
        self._source.observe(group)
        if not group.scores:
            return
        share = sum(map(self._solved, group.scores)) / len(group.scores)
        pool = "easy" if share >= self._config.easy_from else "hard" if share <= self._config.hard_to else None
        if pool is None:
            self._pools.pop(group.task.id, None)
        else:
            self._pools[group.task.id] = pool

    def state(self) -> Mapping[str, Any]:
        """Return the number of tasks that the source gave, the pools, and the source's own state."""
        return {"given": self._drawn, "pools": dict(self._pools), "source": dict(self._source.state())}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state()`."""
        self._drawn = int(state["given"])
        self._pools = dict(state["pools"])
        self._source.restore(state["source"])

    def _comes(self, task: Task) -> bool:
        keep = {"easy": self._config.keep_easy, "hard": self._config.keep_hard}.get(self._pools.get(task.id, ""), 1.0)
        return xxhash.xxh3_64_intdigest(f"pools\x1f{self._seed}\x1f{self._drawn}".encode()) / 2**64 < keep

    def _solved(self, score: Score) -> bool:
        return score.success if score.success is not None else (score.reward or 0.0) > self._config.solved_above
