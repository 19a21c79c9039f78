"""Choice of a long run's rollouts for the viewer, in one pass with bounded memory."""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from sparring.types import Group

PickName = Literal["first", "last", "between", "best", "worst", "failed"]


@dataclass(kw_only=True)
class Picker:
    """Picker of groups in admission order, `per_kind` of each kind; `picked()` returns each chosen group once, with its
    names, in that order."""

    per_kind: int = 3
    _seen: int = 0
    _first: list[tuple[int, Group]] = field(default_factory=list)
    _last: deque[tuple[int, Group]] = field(default_factory=deque)
    _between: list[tuple[int, Group]] = field(default_factory=list)
    _stride: int = 1
    _best: list[tuple[float, int, Group]] = field(default_factory=list)
    _worst: list[tuple[float, int, Group]] = field(default_factory=list)
    _failed: deque[tuple[int, Group]] = field(default_factory=deque)

    def take(self, group: Group) -> None:
        """Consider one group."""
        number = self._seen
        self._seen += 1
        if len(self._first) < self.per_kind:
            self._first.append((number, group))
        self._last.append((number, group))
        if len(self._last) > self.per_kind:
            self._last.popleft()
        self._thin(number, group)
        if group.failed:
            self._failed.append((number, group))
            if len(self._failed) > self.per_kind:
                self._failed.popleft()
        rewards = [score.reward for score in group.scores if score.reward is not None]
        if rewards:
            # of two equal groups the later one is kept: the trained policy matters more
            _keep(self._best, (max(rewards), number, group), self.per_kind)
            _keep(self._worst, (-min(rewards), number, group), self.per_kind)

    def _thin(self, number: int, group: Group) -> None:
        """Keep every `stride`-th group. When there are too many, drop every second and double the stride."""
        if number % self._stride == 0:
            self._between.append((number, group))
        if len(self._between) > 2 * self.per_kind:
            self._between = self._between[::2]
            self._stride *= 2

    def picked(self) -> list[tuple[Group, tuple[PickName, ...]]]:
        """Return the chosen groups with all reasons for each."""
        kinds: list[tuple[PickName, list[tuple[int, Group]]]] = [
            ("first", self._first),
            ("between", self._between[1:]),
            ("last", list(self._last)),
            ("best", [(number, group) for _, number, group in self._best]),
            ("worst", [(number, group) for _, number, group in self._worst]),
            ("failed", list(self._failed)),
        ]
        names: dict[int, list[PickName]] = {}
        groups: dict[int, Group] = {}
        for name, chosen in kinds:
            for number, group in chosen:
                groups[number] = group
                names.setdefault(number, []).append(name)
        return [(groups[number], tuple(names[number])) for number in sorted(groups)]


def _keep(heap: list[tuple[float, int, Group]], entry: tuple[float, int, Group], size: int) -> None:
    if len(heap) < size:
        heapq.heappush(heap, entry)
    else:
        heapq.heappushpop(heap, entry)
