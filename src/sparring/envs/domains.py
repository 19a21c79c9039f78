"""Several environments as one: what `[envs.<name>]` tables make together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from sparring.envs.executor import away, cooperative
from sparring.errors import refusal
from sparring.protocols import AnyEnv, Boxes, EnvFactory, Expert, Scorer, TaskSource
from sparring.types import Group, Rollout, Score, Task


class Domains:
    """Factory of several environments, by name. Implements `protocols.EnvFactory`; the environment of a task is the one
    that its `env` names.

    Args:
        factories: of the environments; at least one.
        places: most rollouts that run at once, by environment; others have no bound of their own.
    """

    def __init__(self, factories: Mapping[str, EnvFactory], places: Mapping[str, int] = MappingProxyType({})) -> None:
        self.factories = dict(factories)
        self.places = dict(places)
        self.name = ", ".join(factories)
        scorers = {name: each.scorer for name, each in factories.items() if each.scorer is not None}
        self.scorer = _DomainScorer(scorers) if scorers else None

    def make(self) -> AnyEnv:
        """Make one world of the first environment, for whoever has no task in hand."""
        return next(iter(self.factories.values())).make()

    def of(self, task: Task) -> EnvFactory:
        """Return the factory of a task's environment."""
        return self.factories[task.env]

    def sources(self, split: str, seed: int) -> dict[str, TaskSource]:
        """Return the stream of each environment, by name; its tasks bear the name in `env` and in their ids."""
        return {name: _OfDomain(name, each.tasks(split, seed)) for name, each in self.factories.items()}

    def tasks(self, split: str, seed: int) -> TaskSource:
        """Return the streams of all environments in turn."""
        return _InTurn(self.sources(split, seed))

    def expert(self, task: Task) -> Expert | Mapping[str, Expert] | None:
        """Return the demonstration of the task's environment."""
        return self.factories[task.env].expert(task)

    async def prove(self, boxes: Boxes) -> tuple[int, int]:
        """Score the right answers of all environments one after another; return the sums."""
        proven = rows = 0
        for factory in self.factories.values():
            right, number = await factory.prove(boxes)
            proven, rows = proven + right, rows + number
        return proven, rows


def factory_of(factory: EnvFactory, task: Task) -> EnvFactory:
    """Return the factory of a task's environment: `factory` itself, or one of the several that it stands for."""
    return factory.of(task) if isinstance(factory, Domains) else factory


class _DomainScorer:
    """Second passes of several environments. Implements `protocols.Scorer`."""

    def __init__(self, scorers: Mapping[str, Scorer]) -> None:
        self._scorers = dict(scorers)

    @cooperative
    async def score(self, task: Task, rollouts: Sequence[Rollout], scores: Sequence[Score]) -> Sequence[Score]:
        """Return the scores of the task's environment; as they are where that has no second pass."""
        scorer = self._scorers.get(task.env)
        return scores if scorer is None else await away(scorer.score, task, rollouts, scores)


class _OfDomain:
    """Source whose tasks bear the name of their environment. Where a task has no tag, that is its tag too, by which
    reports and evaluations are split. Implements `protocols.TaskSource`."""

    def __init__(self, name: str, source: TaskSource) -> None:
        self._name, self._source = name, source

    def next(self) -> Task | None:
        """Return the next task, None at the end."""
        task = self._source.next()
        if not isinstance(task, Task):  # whoever asks refuses it
            return task
        id = task.id if str(task.id).startswith(f"{self._name}/") else f"{self._name}/{task.id}"
        return replace(task, id=id, env=self._name, tag=task.tag or self._name)

    def observe(self, group: Group) -> None:
        """Hand a scored group on."""
        self._source.observe(group)

    def state(self) -> Mapping[str, Any]:
        """Return the state of the source."""
        return self._source.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self._source.restore(state)


class _InTurn:
    """Sources one after the other, a task each, until all have ended. Implements `protocols.TaskSource`."""

    def __init__(self, sources: Mapping[str, TaskSource]) -> None:
        self._sources = dict(sources)
        self._turn = 0
        self._ended: set[str] = set()

    def next(self) -> Task | None:
        """Return the next task, None when all sources have ended."""
        names = list(self._sources)
        while len(self._ended) < len(names):
            name = names[self._turn % len(names)]
            self._turn += 1
            if name not in self._ended:
                task = self._sources[name].next()
                if task is not None:
                    return task
                self._ended.add(name)
        return None

    def observe(self, group: Group) -> None:
        """Hand a scored group to the source of its environment."""
        if group.task.env in self._sources:
            self._sources[group.task.env].observe(group)

    def state(self) -> Mapping[str, Any]:
        """Return whose turn it is, who has ended, and the state of each source."""
        sources = {name: dict(source.state()) for name, source in self._sources.items()}
        return {"turn": self._turn, "ended": sorted(self._ended), "sources": sources}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from there.

        Raises:
            BadInput: the state is of other environments.
        """
        if state["sources"].keys() != self._sources.keys():
            expected, got = ", ".join(self._sources), ", ".join(state["sources"])
            do = "resume with the recipe that the run was started with"
            raise refusal("envs", f"the state of {expected}", f"one of {got}", do)
        self._turn, self._ended = int(state["turn"]), set(state["ended"])
        for name, source in self._sources.items():
            source.restore(state["sources"][name])
