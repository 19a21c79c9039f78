"""Survival: the probability that infrastructure failures let a rollout finish, estimated from failed rollouts (law 6).

A rollout that broke after t turns is censored: it would have had t turns or more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from sparring.types import Group, Rollout

Stage = tuple[int, bool]
"""Stage of a rollout: its number of turns so far, and whether the last one called tools."""


class Survival:
    """Survival of rollouts by environment and stage.

    If d_s of the n_s rollouts that reached stage s broke there, a rollout through the stages S survives with
    probability

        G = product of (1 - d_s / n_s) over s in S

    (Kaplan and Meier 1958, with the failure as the event). Weights of 1 / G make the survivors stand for all admitted
    rollouts (Robins and Rotnitzky 1992), without bias if failures depend on the stage alone and not on how the rollout
    would have gone on. A turn that calls tools is a stage of its own: only such turns depend on the tools' host.

    Attributes:
        counts: by environment and stage, the number of rollouts that reached it and the number that broke there.
    """

    def __init__(self) -> None:
        self.counts: defaultdict[str, dict[Stage, list[float]]] = defaultdict(dict)

    def add(self, group: Group) -> None:
        """Count the rollouts of a group. A rollout that broke several times counts with its longest attempt."""
        for rollout in group.rollouts:
            self._count(group.task.env, stages(rollout), lost=0)
        for rollout in lost_rollouts(group):
            self._count(group.task.env, stages(rollout), lost=1)

    def of(self, environment: str, through: Sequence[Stage]) -> float:
        """Return the probability of surviving these stages; 0 if no counted rollout did."""
        at_stage, share = self.counts[environment], 1.0
        for stage in through:
            reached, lost = at_stage.get(stage, (0.0, 0.0))
            share *= 1 - lost / reached if lost else 1.0
        return share

    def _count(self, environment: str, through: Sequence[Stage], *, lost: int) -> None:
        at_stage = self.counts[environment]
        for stage in through:
            at_stage.setdefault(stage, [0.0, 0.0])[0] += 1
        at_stage[through[-1]][1] += lost


def stages(rollout: Rollout) -> list[Stage]:
    """Return the stages that a rollout went through: its opening, and one for each turn. With several roles,
    tool calls cannot be matched to turns, which have no common order; so all turns count as turns without tools."""
    first = rollout.trajectories[0]
    calls = [bool(s.message and s.message.tool_calls) for s in first.segments if s.model is not None]
    number = turns(rollout)
    if len(rollout.trajectories) > 1 or len(calls) != number:
        calls = [False] * number
    return [(0, False), *((turn, calling) for turn, calling in enumerate(calls, 1))]


def lost_rollouts(group: Group) -> list[Rollout]:
    """Return the rollouts that left a group because they broke, each as its attempt with the most turns. A rollout that
    ended at a limit before its first turn did not break: see `silent_rollouts`."""
    remaining = {rollout.index for rollout in group.rollouts}
    longest: dict[int, Rollout] = {}
    for rollout in group.failed:
        if rollout.purpose != "baseline" and rollout.index not in remaining and not rollout.outcome.trainable:
            other = longest.get(rollout.index)
            longest[rollout.index] = rollout if other is None or turns(rollout) >= turns(other) else other
    return list(longest.values())


def silent_rollouts(group: Group) -> list[Rollout]:
    """Return the rollouts that left a group at a limit before the policy's first turn, such as for too long a prompt:
    they have nothing to score or to train."""
    return [r for r in group.failed if r.purpose != "baseline" and r.outcome.trainable]


def turns(rollout: Rollout) -> int:
    """Return the number of turns of all roles."""
    return sum([t.usage.turns for t in rollout.trajectories])
