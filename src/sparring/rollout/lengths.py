"""Length of the rollouts that were admitted, estimated where some were lost before their end (law 5)."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from sparring.types import Group, Rollout


@dataclass(slots=True)
class _Counts:
    """Rollouts of one environment that ended or broke at one number of turns, and the tokens that they had sampled."""

    ended: int = 0
    ended_tokens: int = 0
    lost: int = 0
    lost_tokens: int = 0


@dataclass(slots=True)
class AdmittedLengths:
    """Account of the lengths of admitted rollouts, by environment.

    A rollout that the infrastructure broke after t turns is censored: it would have had t turns or more. With n_j
    rollouts that reached turn j, of which d_j broke there, a rollout of t turns survives with the probability

        G(t) = (1 - d_0 / n_0) (1 - d_1 / n_1) ... (1 - d_t / n_t)

    (Kaplan and Meier 1958, with the crash as the event), and the mean length of all that were admitted is that of the
    survivors, each weighted by 1 / G (Robins and Rotnitzky 1992). This is unbiased where a crash at a turn hangs on the
    turn alone and not on how much longer the rollout would have gone on. Behind the last turn that any rollout
    survived nothing is known: those that broke last stand for that, with the tokens that they had sampled.
    """

    counts: defaultdict[str, defaultdict[int, _Counts]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(_Counts))
    )

    def add(self, group: Group) -> None:
        """Count the rollouts of a group. Of one that broke several times, its longest attempt counts."""
        at_turn = self.counts[group.task.env]
        for rollout in group.rollouts:
            cell = at_turn[turns(rollout)]
            cell.ended, cell.ended_tokens = cell.ended + 1, cell.ended_tokens + sampled_tokens(rollout)
        for rollout in lost_rollouts(group):
            cell = at_turn[turns(rollout)]
            cell.lost, cell.lost_tokens = cell.lost + 1, cell.lost_tokens + sampled_tokens(rollout)

    def admitted_tokens(self) -> float | None:
        """Return the estimated mean number of tokens of an admitted rollout; None where none was admitted."""
        sums = [_sum(at_turn) for at_turn in self.counts.values()]
        rollouts = sum(number for number, _ in sums)
        return sum(tokens for _, tokens in sums) / rollouts if rollouts else None

    def bias(self) -> float | None:
        """Return the mean length of the rollouts that can be trained over the mean length of all that were admitted: 1
        where no rollout is lost for its length. None where none can be trained or nothing was sampled."""
        cells = [cell for at_turn in self.counts.values() for cell in at_turn.values()]
        ended, admitted = sum(cell.ended for cell in cells), self.admitted_tokens()
        return sum(cell.ended_tokens for cell in cells) / ended / admitted if ended and admitted else None


def _sum(at_turn: dict[int, _Counts]) -> tuple[int, float]:
    """Return the number of admitted rollouts of one environment and the estimated sum of their tokens. Where none ended
    and none had sampled, nothing is known of their lengths: then both are 0."""
    if not any(cell.ended or cell.lost_tokens for cell in at_turn.values()):
        return 0, 0.0
    rollouts = at_risk = sum(cell.ended + cell.lost for cell in at_turn.values())
    survival, tokens, weights = 1.0, 0.0, 0.0
    for _, cell in sorted(at_turn.items()):
        survival *= 1 - cell.lost / at_risk
        at_risk -= cell.ended + cell.lost
        if cell.ended:
            tokens, weights = tokens + cell.ended_tokens / survival, weights + cell.ended / survival
    last = at_turn[max(at_turn)]
    behind = 0.0 if last.ended else (rollouts - weights) * last.lost_tokens / last.lost
    return rollouts, tokens + behind


def lost_rollouts(group: Group) -> list[Rollout]:
    """Return the rollouts that left a group, each as its attempt with the most turns."""
    left = {rollout.index for rollout in group.rollouts}
    longest: dict[int, Rollout] = {}
    for rollout in group.failed:
        if rollout.purpose != "baseline" and rollout.index not in left:
            other = longest.get(rollout.index)
            longest[rollout.index] = rollout if other is None or turns(rollout) >= turns(other) else other
    return list(longest.values())


def turns(rollout: Rollout) -> int:
    """Return the number of turns, over all roles."""
    return sum([t.usage.turns for t in rollout.trajectories])


def sampled_tokens(rollout: Rollout) -> int:
    """Return the number of tokens that our models sampled, over all roles."""
    return sum([t.usage.sampled_tokens for t in rollout.trajectories])
