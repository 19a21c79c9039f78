"""Mixture of task sources, one per environment, that keeps the trained groups at the environments' weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from sparring.errors import refusal
from sparring.observe.metrics import Metrics
from sparring.protocols import TaskSource
from sparring.types import Group, Task, alike

MEMORY = 1000
"""Number of an environment's groups over which its trained part is averaged."""
LEAST_OWED, OWED_OF_IN_FLIGHT = 8.0, 0.7
"""Allowed deficit of an environment in groups: max(8, 0.7 * sqrt(groups in flight)), as in-flight groups end at random.
A larger deficit is written off, because making up for it would crowd other environments out of later steps."""
LEAST_PART = 0.25
"""Floor on the trained part of an environment, which bounds how often it is drawn: an environment that trains no groups
does not take all draws."""
RECENT = 64
"""Number of draws over which an environment's share of draws is averaged."""


class _Share:
    """Account of one environment: its trained groups, its groups in flight, and the average trained part of a group."""

    __slots__ = ("drawn", "in_flight", "most_drawn", "part", "seen", "trained", "weight")

    def __init__(self, weight: float) -> None:
        self.weight = self.drawn = weight
        self.most_drawn = weight / (weight + LEAST_PART * (1 - weight))
        self.trained = 0.0
        self.in_flight = 0
        self.part, self.seen = 1.0, 1

    def note(self, part: float) -> None:
        """Count a finished group with its trained part."""
        self.in_flight = max(0, self.in_flight - 1)
        self.trained += part
        self.seen = min(self.seen + 1, MEMORY)
        self.part += (part - self.part) / self.seen

    @property
    def expected(self) -> float:
        """Expected number of trained groups once all groups in flight have ended."""
        return self.trained + self.part * self.in_flight


class Mix:
    """Task source that draws each task from the environment whose trained groups fall short of its weight the most.
    Implements `protocols.TaskSource`.

    Weights are shares of what is trained, not of what is drawn: a group counts with the share of its rollouts that are
    trained, and a dropped group with 0. Groups in flight count with their environment's average (deficit round robin,
    Shreedhar and Varghese 1995, on expected counts). The choice is a function of the drawn and observed groups, without
    a random generator. A finite source that has ended leaves the mixture; the others share its weight.

    Args:
        sources: task sources by environment, the `env` of their tasks; finite or endless.
        weights: relative weights by environment.
        drops_equal: whether updates drop groups with equal rewards.

    Raises:
        BadInput: the weights do not match the sources, are negative or not finite, or are all zero.
    """

    def __init__(
        self, sources: Mapping[str, TaskSource], weights: Mapping[str, float], *, drops_equal: bool = False
    ) -> None:
        total = math.fsum(weights.values())
        if sources.keys() != weights.keys() or min(weights.values(), default=0) < 0 or not 0 < total < math.inf:
            expected = f"a weight of 0 or more for each of {', '.join(sources) or 'no environment'}, one above 0"
            raise refusal("mix", expected, repr(dict(weights)), "give each environment its weight")
        self._sources = dict(sources)
        self._shares = {name: _Share(weights[name] / total) for name in sources}
        self._drops_equal = drops_equal
        self._ended: set[str] = set()
        self._metrics = Metrics()

    def next(self) -> Task | None:
        while (name := self._furthest_behind()) is not None:
            task = self._sources[name].next()
            if task is not None:
                self._shares[name].in_flight += 1
                for other, share in self._shares.items():
                    share.drawn += ((other == name) - share.drawn) / RECENT
                return task
            self._ended.add(name)
        return None

    def observe(self, group: Group) -> None:
        name = group.task.env
        if name not in self._shares:
            return
        part = trained_part(group, drops_equal=self._drops_equal)
        self._shares[name].note(part)
        total = math.fsum(share.trained for share in self._shares.values())
        in_flight = sum(share.in_flight for share in self._shares.values())
        owed = max(LEAST_OWED, OWED_OF_IN_FLIGHT * math.sqrt(in_flight))
        for share in self._shares.values():
            share.trained = max(share.trained, share.weight * total - owed)
        self._measure(name, group, part)
        self._sources[name].observe(group)

    def metrics(self) -> dict[str, float]:
        """Return metrics of the groups observed since the last call, by environment: `<name>/reward` and
        `<name>/success`, means over the remaining rollouts; `<name>/share`, the environment's share of all trained
        groups; `<name>/trained_part`, the trained share of its own rollouts."""
        return {f"rollout/{name}": value for name, value in self._metrics.take().items()}

    def state(self) -> Mapping[str, Any]:
        shares = {
            name: [share.trained, share.in_flight, share.part, share.seen, share.drawn]
            for name, share in self._shares.items()
        }
        sources = {name: dict(source.state()) for name, source in self._sources.items()}
        return {"shares": shares, "ended": sorted(self._ended), "sources": sources}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state` of the same sources; refuse a state of other sources (`BadInput`)."""
        if state["sources"].keys() != self._sources.keys():
            raise refusal(
                "mix",
                f"the state of the environments {', '.join(self._sources)}",
                f"one of {', '.join(state['sources'])}",
                "resume with the recipe that the run was started with",
            )
        for name, (trained, in_flight, part, num_seen, drawn_share) in state["shares"].items():
            share = self._shares[name]
            share.trained, share.part, share.drawn = float(trained), float(part), float(drawn_share)
            share.in_flight, share.seen = int(in_flight), int(num_seen)
        self._ended = set(state["ended"])
        for name, source in self._sources.items():
            source.restore(state["sources"][name])

    def _furthest_behind(self) -> str | None:
        """Return the environment of the next task: among those not drawn too often recently, the one with the largest
        deficit of expected trained groups."""
        live = {name: share for name, share in self._shares.items() if share.weight and name not in self._ended}
        if not live:
            return None
        weights = math.fsum(share.weight for share in live.values())
        expected = 1 + math.fsum(share.expected for share in live.values())

        def behind(name: str) -> tuple[bool, float]:
            share, weight = live[name], live[name].weight / weights
            return share.drawn <= share.most_drawn, weight * expected - share.expected

        return max(live, key=behind)

    def _measure(self, name: str, group: Group, part: float) -> None:
        for other in self._shares:
            self._metrics.add(f"{other}/share", part if other == name else 0.0, "ratio", weight=part)
        self._metrics.add(f"{name}/trained_part", part)
        for score in group.scores:
            self._metrics.add(f"{name}/reward", score.reward or 0.0)
            if score.success is not None:
                self._metrics.add(f"{name}/success", float(score.success))


def trained_part(group: Group, *, drops_equal: bool) -> float:
    """Return the trained share of a group's admitted rollouts."""
    roles = {role for score in group.scores for role in score.per_role or {}}
    rewards = [
        [score.reward for score in group.scores],
        *([score.of(role) for score in group.scores] for role in roles),
    ]
    if drops_equal and all(map(alike, rewards)):
        return 0.0
    remaining = {rollout.index for rollout in group.rollouts}
    lost = {rollout.index for rollout in group.failed if rollout.purpose != "baseline"} - remaining
    return len(remaining) / (len(remaining) + len(lost)) if remaining else 0.0
