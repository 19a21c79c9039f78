"""Difficulty pools: tasks that the policy always or never solves come less often."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import xxhash

from sparring.protocols import TaskSource
from sparring.types import Group, Score, Task

MOST_PASSED_OVER = 1000
"""Maximum number of consecutive tasks that are skipped; the next task comes whatever its pool."""


class DifficultyPools(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Pools of tasks that may be skipped. A task is in the pool of its last group: easy, hard or neither; a task
    without a scored group is in none."""

    easy_from: float = 1.0
    """Smallest share of successful members of an easy task's group."""

    hard_to: float = 0.0
    """Largest share of successful members of a hard task's group."""

    keep_easy: float = 0.1
    """Probability of keeping an easy task when it comes up."""

    keep_hard: float = 1.0
    """Probability of keeping a hard task when it comes up."""

    solved_above: float = 0.5
    """Reward above which a member succeeded, for scorers that do not report success."""

    def __post_init__(self) -> None:
        for name in ("easy_from", "hard_to", "keep_easy", "keep_hard"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must lie between 0 and 1")
        if self.hard_to >= self.easy_from:
            raise ValueError("hard_to must be below easy_from")

    def open(self, source: TaskSource, *, seed: int) -> Pools:
        """Return the source with tasks skipped at random by `seed`."""
        return Pools(self, source, seed=seed)


class Pools:
    """Task source that skips some easy and hard tasks. Implements `protocols.TaskSource`.

    Skipping is a function of the seed, the position in the source and the task's pool, so a resumed run skips the same
    tasks.
    """

    def __init__(self, config: DifficultyPools, source: TaskSource, *, seed: int) -> None:
        self._config = config
        self._source = source
        self._seed = seed
        self._drawn = 0
        self._pools: dict[str, str] = {}

    def next(self) -> Task | None:
        for _ in range(MOST_PASSED_OVER):
            task = self._source.next()
            self._drawn += 1
            if task is None or self._is_kept(task):
                return task
        return self._source.next()

    def observe(self, group: Group) -> None:
        self._source.observe(group)
        if not group.scores:
            return
        share = sum(map(self._is_solved, group.scores)) / len(group.scores)
        pool = "easy" if share >= self._config.easy_from else "hard" if share <= self._config.hard_to else None
        if pool is None:
            self._pools.pop(group.task.id, None)
        else:
            self._pools[group.task.id] = pool

    def state(self) -> Mapping[str, Any]:
        return {"given": self._drawn, "pools": dict(self._pools), "source": dict(self._source.state())}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._drawn = int(state["given"])
        self._pools = dict(state["pools"])
        self._source.restore(state["source"])

    def _is_kept(self, task: Task) -> bool:
        keep = {"easy": self._config.keep_easy, "hard": self._config.keep_hard}.get(self._pools.get(task.id, ""), 1.0)
        return xxhash.xxh3_64_intdigest(f"pools\x1f{self._seed}\x1f{self._drawn}".encode()) / 2**64 < keep

    def _is_solved(self, score: Score) -> bool:
        return score.success if score.success is not None else (score.reward or 0.0) > self._config.solved_above
