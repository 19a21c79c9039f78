"""Rollouts that were admitted, estimated where some were lost before their end: their length, their success, their
domains (law 5)."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from sparring.observe.survival import Stage, Survival, lost_rollouts, stages
from sparring.types import Group, Rollout


@dataclass(slots=True)
class _Counts:
    """Rollouts of one environment that ended, or broke, after the same stages: the tokens that they had sampled, those
    that were judged, and those that succeeded."""

    ended: int = 0
    ended_tokens: int = 0
    judged: int = 0
    succeeded: int = 0
    lost: int = 0
    lost_tokens: int = 0


@dataclass(slots=True)
class AdmittedRollouts:
    """Account of the rollouts of a step that were admitted, those that can be trained and those that were lost.

    The mean length, or success, of all that were admitted is that of the survivors, each weighted by 1 / G (see
    `Survival`). Behind the last stage that any rollout survived nothing is known: those that broke there stand for
    that, with the tokens that they had sampled. A task's domain is its environment, and its tag.

    Attributes:
        survival: of the step's rollouts.
        counts: by environment, of those that went through the same stages.
        trained: by domain, rollouts that can be trained.
        lost: by domain, rollouts that were lost.
    """

    survival: Survival = field(default_factory=Survival)
    counts: defaultdict[str, defaultdict[tuple[Stage, ...], _Counts]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(_Counts))
    )
    trained: Counter[str] = field(default_factory=Counter)
    lost: Counter[str] = field(default_factory=Counter)

    def add(self, group: Group) -> None:
        """Count the rollouts of a group. Of one that broke several times, its longest attempt counts."""
        self.survival.add(group)
        cells, lost = self.counts[group.task.env], lost_rollouts(group)
        for rollout, score in zip(group.rollouts, group.scores, strict=True):
            cell = cells[tuple(stages(rollout))]
            cell.ended, cell.ended_tokens = cell.ended + 1, cell.ended_tokens + sampled_tokens(rollout)
            cell.judged, cell.succeeded = (
                cell.judged + (score.success is not None),
                cell.succeeded + bool(score.success),
            )
        for rollout in lost:
            cell = cells[tuple(stages(rollout))]
            cell.lost, cell.lost_tokens = cell.lost + 1, cell.lost_tokens + sampled_tokens(rollout)
        for domain in {group.task.env, group.task.tag} - {""}:
            self.trained[domain] += len(group.rollouts)
            self.lost[domain] += len(lost)

    def admitted_tokens(self) -> float | None:
        """Return the estimated mean number of tokens of an admitted rollout; None where none was admitted."""
        rollouts, tokens = 0, 0.0
        for env, cells in self.counts.items():
            if any(cell.ended or cell.lost_tokens for cell in cells.values()):  # else nothing is known of lengths
                rollouts += sum(cell.ended + cell.lost for cell in cells.values())
                tokens += self._weighted(env, lambda cell: cell.ended_tokens, lambda cell: cell.lost_tokens)
        return tokens / rollouts if rollouts else None

    def length_bias(self) -> float | None:
        """Return the mean length of the rollouts that can be trained over the mean length of all that were admitted: 1
        where no rollout is lost for its length. None where none can be trained or nothing was sampled."""
        ended, admitted = self._sum(lambda cell: cell.ended), self.admitted_tokens()
        return self._sum(lambda cell: cell.ended_tokens) / ended / admitted if ended and admitted else None

    def admitted_success(self) -> float | None:
        """Return the estimated share of admitted rollouts that would have succeeded; None where the environments do not
        say what a success is. An environment of which nothing is left says nothing."""
        rollouts, succeeded = 0.0, 0.0
        for env, cells in self.counts.items():
            judged = self._weighted(env, lambda cell: cell.judged)
            if judged:
                admitted = sum(cell.ended + cell.lost for cell in cells.values())
                rollouts += admitted
                succeeded += admitted * self._weighted(env, lambda cell: cell.succeeded) / judged
        return succeeded / rollouts if rollouts else None

    def success_bias(self) -> float | None:
        """Return the success of the rollouts that can be trained over that of all that were admitted: above 1 where
        those of difficult tasks are lost. None where nothing is known of success, or none succeeded."""
        judged, admitted = self._sum(lambda cell: cell.judged), self.admitted_success()
        return self._sum(lambda cell: cell.succeeded) / judged / admitted if judged and admitted else None

    def domain_bias(self) -> dict[str, float]:
        """Return each domain's share of the rollouts that can be trained over its share of those that were admitted.
        Nothing where there is one domain, or nothing can be trained."""
        trained = self._sum(lambda cell: cell.ended)
        admitted = trained + self._sum(lambda cell: cell.lost)
        if len(self.trained) < 2 or not trained:
            return {}
        return {
            domain: (number / trained) / ((number + self.lost[domain]) / admitted)
            for domain, number in self.trained.items()
            if number + self.lost[domain]
        }

    def _sum(self, of: Callable[[_Counts], int]) -> int:
        return sum(of(cell) for cells in self.counts.values() for cell in cells.values())

    def _weighted(
        self, env: str, of_ended: Callable[[_Counts], int], of_lost: Callable[[_Counts], int] = lambda cell: 0
    ) -> float:
        """Return a sum over the rollouts of an environment that ended, each weighted by 1 / G. Those that broke where
        all did stand for what would have come behind."""
        total = 0.0
        for through, cell in self.counts[env].items():
            if cell.ended:
                total += of_ended(cell) / self.survival.of(env, through)
            elif not self.survival.of(env, through):
                total += of_lost(cell) / self.survival.of(env, through[:-1])
        return total


def sampled_tokens(rollout: Rollout) -> int:
    """Return the number of tokens that our models sampled, over all roles."""
    return sum([t.usage.sampled_tokens for t in rollout.trajectories])
