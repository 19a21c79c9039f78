"""A mixture of task sources, one for each environment, that keeps what is trained at their weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from sparring.errors import refusal
from sparring.observe.metrics import Metrics
from sparring.protocols import TaskSource
from sparring.types import Group, Task, alike

MEMORY = 1000
"""Groups of an environment over which its trained part is averaged."""
LEAST_OWED, OWED_OF_IN_FLIGHT = 8.0, 0.7
"""Groups that an environment may be behind its weight: the first, or the second times the square root of those in
flight, of whose fate chance alone decides so much. What it loses beyond that is not made up for: it would crowd the
others out of later steps."""
LEAST_PART = 0.25
"""An environment is drawn as often as if at least this part of its groups were trained, and all of the others', but not
more often: one of which nothing is left does not crowd the others out."""
RECENT = 64
"""Draws over which that is counted."""


class _Share:
    """Account of one environment: what was trained of it, in groups, what is in flight, and what part of a group is
    trained on average."""

    __slots__ = ("drawn", "in_flight", "most_drawn", "part", "seen", "trained", "weight")

    def __init__(self, weight: float) -> None:
        self.weight = self.drawn = weight
        self.most_drawn = weight / (weight + LEAST_PART * (1 - weight))
        self.trained = 0.0
        self.in_flight = 0
        self.part, self.seen = 1.0, 1

    def note(self, part: float) -> None:
        """Count a group of which `part` is trained."""
        self.in_flight = max(0, self.in_flight - 1)
        self.trained += part
        self.seen = min(self.seen + 1, MEMORY)
        self.part += (part - self.part) / self.seen

    @property
    def expected(self) -> float:
        """Trained groups when what is in flight has ended."""
        return self.trained + self.part * self.in_flight


class Mix:
    """Source that draws each task from the environment that is furthest behind its weight. Implements
    `protocols.TaskSource`.

    The weights are shares of what is trained, not of what is drawn: a group counts with the part of its rollouts that
    are left to train, and with nothing where the update leaves it out. What is in flight counts with the part that is
    trained of that environment on average (deficit round robin, Shreedhar and Varghese 1995, on expected counts). Which
    environment comes hangs on the groups that were observed and drawn alone: there is no generator whose state could be
    lost. A finite source that ends leaves the mixture; its share falls to the others.

    Args:
        sources: by the environment's name, which stands in their tasks' `env`; finite or endless.
        weights: by the same names, relative to one another.
        drops_equal: whether updates leave groups of equal rewards out.

    Raises:
        BadInput: weights that do not fit the sources, are negative or not finite, or are all zero.
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
        """Return the next task, None when every source with a weight has ended."""
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
        """Count what is trained of a group, and hand it to the source that its task came from."""
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
        """Return, by environment, figures of the groups observed since the last call: `<name>/reward` and
        `<name>/success`, means over the rollouts left; `<name>/share`, of all that is trained; `<name>/trained_part`,
        of its own rollouts."""
        return {f"rollout/{name}": value for name, value in self._metrics.take().items()}

    def state(self) -> Mapping[str, Any]:
        """Return the account of each environment, the sources that ended, and each source's own state."""
        shares = {
            name: [share.trained, share.in_flight, share.part, share.seen, share.drawn]
            for name, share in self._shares.items()
        }
        sources = {name: dict(source.state()) for name, source in self._sources.items()}
        return {"shares": shares, "ended": sorted(self._ended), "sources": sources}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state()` of a mixture of the same sources.

        Raises:
            BadInput: the state is of other sources.
        """
        if state["sources"].keys() != self._sources.keys():
            raise refusal(
                "mix",
                f"the state of the environments {', '.join(self._sources)}",
                f"one of {', '.join(state['sources'])}",
                "resume with the recipe that the run was started with",
            )
        for name, (trained, in_flight, part, seen, drawn) in state["shares"].items():
            share = self._shares[name]
            share.trained, share.part, share.drawn = float(trained), float(part), float(drawn)
            share.in_flight, share.seen = int(in_flight), int(seen)
        self._ended = set(state["ended"])
        for name, source in self._sources.items():
            source.restore(state["sources"][name])

    def _furthest_behind(self) -> str | None:
        """Return the environment that the next task comes from: of those that were not drawn too often of late, the
        one whose expected trained groups lack most of its weight's share."""
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
    """Return the part of a group's admitted rollouts that is trained, from 0 to 1."""
    roles = {role for score in group.scores for role in score.per_role or {}}
    earned = [[score.reward for score in group.scores], *([score.of(role) for score in group.scores] for role in roles)]
    if drops_equal and all(map(alike, earned)):
        return 0.0
    left = {rollout.index for rollout in group.rollouts}
    lost = {rollout.index for rollout in group.failed if rollout.purpose != "baseline"} - left
    return len(left) / (len(left) + len(lost)) if left else 0.0
