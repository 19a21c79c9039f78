"""Estimates over all admitted rollouts of a step, including the lost ones: their length, success and domains (law
5)."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from sparring.observe.survival import Stage, Survival, lost_rollouts, stages
from sparring.types import Group, Rollout


@dataclass(slots=True)
class _Counts:
    """Counts over the rollouts of one environment that went through the same stages.

    Attributes:
        ended, ended_tokens: number of rollouts that ended, and of their sampled tokens.
        judged, succeeded: number of ended rollouts with a known success, and with a success.
        lost, lost_tokens: number of lost rollouts, and of their sampled tokens.
    """

    ended: int = 0
    ended_tokens: int = 0
    judged: int = 0
    succeeded: int = 0
    lost: int = 0
    lost_tokens: int = 0


@dataclass(slots=True)
class AdmittedRollouts:
    """Account of a step's admitted rollouts: those that can be trained, and those that were lost.

    The mean length and the mean success of all admitted rollouts are estimated from the survivors, each weighted by 1 /
    G (see `Survival`). If every rollout was lost at a stage, the lost rollouts are counted instead, with the tokens
    that they had sampled. The domains of a task are its environment and its tag.

    Attributes:
        survival: estimated probability of surviving each stage, from the step's rollouts.
        trained: number of rollouts that can be trained, by domain.
        lost: number of lost rollouts, by domain.
    """

    survival: Survival = field(default_factory=Survival)
    counts: defaultdict[str, defaultdict[tuple[Stage, ...], _Counts]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(_Counts))
    )
    trained: Counter[str] = field(default_factory=Counter)
    lost: Counter[str] = field(default_factory=Counter)

    def add(self, group: Group) -> None:
        """Count the rollouts of a group. A lost rollout counts once, by its longest attempt."""
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
        """Return the estimated mean number of tokens of an admitted rollout, or None if no length is known."""
        rollouts, tokens = 0, 0.0
        for env, cells in self.counts.items():
            if any(cell.ended or cell.lost_tokens for cell in cells.values()):  # else no length is known
                rollouts += sum(cell.ended + cell.lost for cell in cells.values())
                tokens += self._weighted(env, lambda cell: cell.ended_tokens, lambda cell: cell.lost_tokens)
        return tokens / rollouts if rollouts else None

    def length_bias(self) -> float | None:
        """Return the mean length of trainable rollouts divided by the mean length of all admitted ones. The result is 1
        if the loss of rollouts does not depend on their length, and None if no rollout can be trained or no token was
        sampled."""
        ended, admitted = self._sum(lambda cell: cell.ended), self.admitted_tokens()
        return self._sum(lambda cell: cell.ended_tokens) / ended / admitted if ended and admitted else None

    def admitted_success(self) -> float | None:
        """Return the estimated success rate of all admitted rollouts, or None if the environments report no success. An
        environment without a surviving rollout is left out."""
        rollouts, succeeded = 0.0, 0.0
        for env, cells in self.counts.items():
            judged = self._weighted(env, lambda cell: cell.judged)
            if judged:
                admitted = sum(cell.ended + cell.lost for cell in cells.values())
                rollouts += admitted
                succeeded += admitted * self._weighted(env, lambda cell: cell.succeeded) / judged
        return succeeded / rollouts if rollouts else None

    def success_bias(self) -> float | None:
        """Return the success rate of trainable rollouts divided by the success rate of all admitted ones. The result is
        above 1 if rollouts of difficult tasks are lost more often, and None if no success is known."""
        judged, admitted = self._sum(lambda cell: cell.judged), self.admitted_success()
        return self._sum(lambda cell: cell.succeeded) / judged / admitted if judged and admitted else None

    def domain_bias(self) -> dict[str, float]:
        """Return each domain's share of the trainable rollouts divided by its share of the admitted ones. The result is
        empty if there is only one domain or no rollout can be trained."""
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
        """Return the sum of a count over an environment's ended rollouts, each weighted by 1 / G. If all rollouts were
        lost at a stage, the count of the lost ones is added instead."""
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
