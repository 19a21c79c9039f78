"""Choice of a long run's rollouts for the viewer, in one pass with bounded memory."""

from __future__ import annotations

import heapq
from typing import Literal, get_args

from sparring.types import Group

PickName = Literal["first", "between", "last", "best", "worst", "failed"]


class Picker:
    """Picker of groups in admission order, `per_kind` of each kind."""

    def __init__(self, per_kind: int) -> None:
        self._per_kind, self._num_groups = per_kind, 0
        self._highest: dict[PickName, list[tuple[float, int, Group]]] = {name: [] for name in get_args(PickName)}
        self._between: list[tuple[int, Group]] = []
        self._stride = 1

    def take(self, group: Group) -> None:
        """Consider one group."""
        number = self._num_groups
        self._num_groups += 1
        ranks: dict[PickName, float] = {"first": -number, "last": number}
        if group.failed:
            ranks["failed"] = number
        rewards = [score.reward for score in group.scores if score.reward is not None]
        if rewards:
            ranks |= {"best": max(rewards), "worst": -min(rewards)}
        for name, rank in ranks.items():
            # of two equal groups the later one is kept: the trained policy matters more
            heapq.heappush(self._highest[name], (rank, number, group))
            if len(self._highest[name]) > self._per_kind:
                heapq.heappop(self._highest[name])
        self._thin(number, group)

    def _thin(self, number: int, group: Group) -> None:
        """Keep every `stride`-th group. When there are too many, drop every second and double the stride."""
        if number % self._stride == 0:
            self._between.append((number, group))
        if len(self._between) > 2 * self._per_kind:
            self._between = self._between[::2]
            self._stride *= 2

    def picked(self) -> list[tuple[Group, tuple[PickName, ...]]]:
        """Return each chosen group once, in admission order, with all reasons for it."""
        names: dict[int, list[PickName]] = {}
        groups: dict[int, Group] = {}
        for name, highest in self._highest.items():
            chosen = self._between[1:] if name == "between" else [(number, group) for _, number, group in highest]
            for number, group in chosen:
                groups[number] = group
                names.setdefault(number, []).append(name)
        return [(groups[number], tuple(names[number])) for number in sorted(groups)]
