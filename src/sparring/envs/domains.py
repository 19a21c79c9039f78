"""Several environments as one: the `[envs.<name>]` tables of a recipe."""

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
    """Factory of several named environments; the `env` of a task names the environment that it belongs to. Implements
    `protocols.EnvFactory`.

    Args:
        factories: factories of the environments; at least one.
        places: maximum number of concurrent rollouts by environment; an environment that is missing here has no limit
            of its own.
    """

    def __init__(self, factories: Mapping[str, EnvFactory], places: Mapping[str, int] = MappingProxyType({})) -> None:
        self.factories = dict(factories)
        self.places = dict(places)
        self.name = ", ".join(factories)
        scorers = {name: each.scorer for name, each in factories.items() if each.scorer is not None}
        self.scorer: Scorer | None = _DomainScorer(scorers) if scorers else None

    def make(self) -> AnyEnv:
        """Make an instance of the first environment."""
        return next(iter(self.factories.values())).make()

    def of(self, task: Task) -> EnvFactory:
        """Return the factory of the environment that a task belongs to."""
        return self.factories[task.env]

    def sources(self, split: str, seed: int) -> dict[str, TaskSource]:
        """Return the task stream of each environment, by name. The tasks of a stream have this name in `env` and in
        their ids."""
        return {name: _OfDomain(name, each.tasks(split, seed)) for name, each in self.factories.items()}

    def tasks(self, split: str, seed: int) -> TaskSource:
        """Return one stream that takes a task from each environment in turn."""
        return _InTurn(self.sources(split, seed))

    def expert(self, task: Task) -> Expert | Mapping[str, Expert] | None:
        return self.factories[task.env].expert(task)

    async def prove(self, boxes: Boxes) -> tuple[int, int]:
        proven = rows = 0
        for factory in self.factories.values():
            right, number = await factory.prove(boxes)
            proven, rows = proven + right, rows + number
        return proven, rows


def factory_of(factory: EnvFactory, task: Task) -> EnvFactory:
    """Return the factory of a task's environment: its member of a `Domains`, or else `factory` itself."""
    return factory.of(task) if isinstance(factory, Domains) else factory


class _DomainScorer:
    """Second scoring pass that leaves each group to its environment's scorer. Implements `protocols.Scorer`."""

    def __init__(self, scorers: Mapping[str, Scorer]) -> None:
        self._scorers = dict(scorers)

    @cooperative
    async def score(self, task: Task, rollouts: Sequence[Rollout], scores: Sequence[Score]) -> Sequence[Score]:
        scorer = self._scorers.get(task.env)
        return scores if scorer is None else await away(scorer.score, task, rollouts, scores)


class _OfDomain:
    """Task stream that writes the environment's name into `env`, and into `tag` if the task has no tag. Implements
    `protocols.TaskSource`."""

    def __init__(self, name: str, source: TaskSource) -> None:
        self._name, self._source = name, source

    def next(self) -> Task | None:
        task = self._source.next()
        if not isinstance(task, Task):  # refused by the caller
            return task
        id = task.id if str(task.id).startswith(f"{self._name}/") else f"{self._name}/{task.id}"
        return replace(task, id=id, env=self._name, tag=task.tag or self._name)

    def observe(self, group: Group) -> None:
        self._source.observe(group)

    def state(self) -> Mapping[str, Any]:
        return self._source.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        self._source.restore(state)


class _InTurn:
    """Task streams that take turns until all have ended. Implements `protocols.TaskSource`."""

    def __init__(self, sources: Mapping[str, TaskSource]) -> None:
        self._sources = dict(sources)
        self._turn = 0
        self._ended: set[str] = set()

    def next(self) -> Task | None:
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
        if group.task.env in self._sources:
            self._sources[group.task.env].observe(group)

    def state(self) -> Mapping[str, Any]:
        sources = {name: dict(source.state()) for name, source in self._sources.items()}
        return {"turn": self._turn, "ended": sorted(self._ended), "sources": sources}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`; refuse a state of other environments (`BadInput`)."""
        if state["sources"].keys() != self._sources.keys():
            expected, actual = ", ".join(self._sources), ", ".join(state["sources"])
            remedy = "resume with the recipe that the run was started with"
            raise refusal("envs", f"the state of {expected}", f"one of {actual}", remedy)
        self._turn, self._ended = int(state["turn"]), set(state["ended"])
        for name, source in self._sources.items():
            source.restore(state["sources"][name])
