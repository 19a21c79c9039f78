"""A weighted mixture of task sources that resumes at the exact task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import xxhash

from sparring.errors import refusal
from sparring.protocols import TaskSource
from sparring.types import Group, Task


class Mix:
    """Draws each task from one of several sources, in proportion to their weights.

    Which source serves draw i depends on (seed, i) and on which sources have ended, nothing else: there is no generator
    whose state could be lost. A finite source that ends leaves the mixture; its share falls to the others.

    Args:
        sources: finite or endless.
        weights: one for each, relative to one another.
        seed: of the choices.

    Raises:
        BadInput: weights that do not fit the sources, are negative, or are all zero.
    """

    def __init__(self, sources: Sequence[TaskSource], weights: Sequence[float], seed: int) -> None:
        if len(sources) != len(weights) or min(weights, default=0) < 0 or not sum(weights):
            raise refusal(
                "mix",
                f"{len(sources)} weights of 0 or more, one above 0",
                repr(list(weights)),
                "give each source its weight",
            )
        self._sources = tuple(sources)
        self._weights = tuple(weights)
        self._seed = seed
        self._draws = 0
        self._ended: set[int] = set()
        self._origins: dict[str, list[int]] = {}

    def next(self) -> Task | None:
        """The next task, None when every source with a weight has ended."""
        while (chosen := self._chosen(self._draws)) is not None:
            task = self._sources[chosen].next()
            if task is not None:
                self._draws += 1
                self._origins.setdefault(task.id, []).append(chosen)
                return task
            self._ended.add(chosen)
        return None

    def observe(self, group: Group) -> None:
        """Hand a scored group to the source that its task came from. Groups are shown in admission order, so of several
        with one task id the first belongs to the draw that came first."""
        origins = self._origins.get(group.task.id)
        if not origins:
            return
        self._sources[origins.pop(0)].observe(group)
        if not origins:
            del self._origins[group.task.id]

    def state(self) -> Mapping[str, Any]:
        """Draws so far, the sources that ended, what is still to be observed, and each source's own state."""
        return {
            "draws": self._draws,
            "ended": sorted(self._ended),
            "origins": {task: list(origins) for task, origins in self._origins.items()},
            "sources": [dict(source.state()) for source in self._sources],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state()` of a mixture of the same sources.

        Raises:
            BadInput: the state is of another number of sources.
        """
        if len(state["sources"]) != len(self._sources):
            raise refusal(
                "mix",
                f"the state of {len(self._sources)} sources",
                f"one of {len(state['sources'])}",
                "resume with the recipe that the run was started with",
            )
        self._draws = int(state["draws"])
        self._ended = set(state["ended"])
        before = {task: [origin] for task, origin in state.get("origin", {}).items()}  # as states were once written
        self._origins = {task: list(origins) for task, origins in state.get("origins", before).items()}
        for source, inner in zip(self._sources, state["sources"], strict=True):
            source.restore(inner)

    def _chosen(self, draw: int) -> int | None:
        live = [i for i, weight in enumerate(self._weights) if weight and i not in self._ended]
        if not live:
            return None
        uniform = xxhash.xxh3_64_intdigest(f"mix\x1f{self._seed}\x1f{draw}".encode()) / 2**64
        left = uniform * sum(self._weights[i] for i in live)
        for index in live[:-1]:
            left -= self._weights[index]
            if left < 0:
                return index
        return live[-1]
