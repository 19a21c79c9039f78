"""Generalised advantage estimation with a critic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from sparring.algo.credit.base import BaseCredit
from sparring.algo.credit.members import Member, members, returns, set_advantages
from sparring.algo.credit.statistics import standardised
from sparring.annotations import Annotation
from sparring.types import Group, Sample


class Gae(BaseCredit, frozen=True, kw_only=True, tag="gae"):
    """GAE: rewards from a token on, compared with a critic's prediction.

        delta_t  = r_t + discount * V_(t+1) - V_t          V after the last token is 0
        A_t      = sum_{l >= 0} (discount * lambda_policy)^l * delta_(t+l)
        return_t = sum_{l >= 0} (discount * lambda_value)^l * delta_(t+l) + V_t       the critic's target

    t + 1 is the next sampled token of the branch. At the end of a branch that another branch quotes or continues, t + 1
    is the first token sampled in that other branch (`succession`). The reward of a side branch, such as a sub-agent, is
    part of r_t of the turn that started it.

    Schulman et al., arXiv 1506.02438, equation 16. A token's reward r_t is its own (annotation `reward`, such as a KL
    penalty), plus its turn's reward at the turn's last token, plus the rest of the outcome at the last token. The
    annotation `value` is the critic's value of the context before the token. Two different lambdas are decoupled GAE
    (VC-PPO, arXiv 2503.01491). `length_alpha` adapts the policy's lambda to the number l of sampled tokens: max(0, 1 -
    1 / (length_alpha * l)) (VAPO, arXiv 2504.05118, section 4.2). Use it for PPO: long rollouts, dense rewards, one
    rollout per task. The critic's target is written as the annotation `return`.
    """

    least_members: ClassVar[int] = 1
    tells_turns_apart: ClassVar[bool] = True
    reads: ClassVar[tuple[Annotation, ...]] = (Annotation.VALUE,)

    discount: float = 1.0
    """Discount per token."""

    lambda_policy: float = 0.95
    """Lambda of the advantages: weight of observed rewards against the critic's values."""

    lambda_value: float = 1.0
    """Lambda of the critic's target; 1 uses observed rewards only."""

    length_alpha: float | None = None
    """Strength of the length-adaptive lambda, which replaces lambda_policy; VAPO uses 0.05. None: lambda_policy for
    every length."""

    whiten: bool = True
    """Standardise the advantages over all tokens of the update."""

    epsilon: float = 1e-8
    """Added to the standard deviation."""

    def __post_init__(self) -> None:
        for name in ("discount", "lambda_policy", "lambda_value"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must lie between 0 and 1, got {getattr(self, name)}")
        if self.length_alpha is not None and self.length_alpha <= 0:
            raise ValueError(f"length_alpha must be above 0, got {self.length_alpha}")

    def credit(self, groups: Sequence[Group], samples: Sequence[Sequence[Sample]]) -> list[list[Sample]]:
        everyone = [members(group, rows) for group, rows in zip(groups, samples, strict=True)]
        results = [self._advantages_and_targets(m) for of_group in everyone for m in of_group]
        advantages = [a for values, _ in results for a in values]
        if self.whiten:
            advantages = standardised(advantages, epsilon=self.epsilon, lost=0)
        normal, targets = iter(advantages), iter(target for _, target in results)
        credited = []
        for of_group, rows in zip(everyone, samples, strict=True):
            aimed = [replace(m, rows=m.with_steps(next(targets), Annotation.RETURN)) for m in of_group]
            of_steps = {m.trajectory.id: [next(normal) for _ in range(m.length)] for m in aimed}
            credited.append(set_advantages(rows, aimed, of_steps, Member.with_steps))
        return credited

    def _advantages_and_targets(self, member: Member) -> tuple[list[float], list[float]]:
        """Compute a member's advantages before whitening, and the critic's targets."""
        values, rewards = member.read(Annotation.VALUE, "gae"), member.step_rewards(self.discount)
        following = member.following()
        after = [0.0 if step is None else values[step] for step in following]
        deltas = [r + self.discount * later - now for r, later, now in zip(rewards, after, values, strict=True)]
        lambda_policy = self.lambda_policy
        if self.length_alpha is not None and values:
            lambda_policy = max(0.0, 1 - 1 / (self.length_alpha * len(values)))
        value_returns = returns(deltas, self.discount * self.lambda_value, following)
        targets = [g + v for g, v in zip(value_returns, values, strict=True)]
        return returns(deltas, self.discount * lambda_policy, following), targets
