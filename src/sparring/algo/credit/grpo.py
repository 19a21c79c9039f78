"""Group-relative advantages: a rollout is compared with the other rollouts of its task."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from sparring.algo.credit.base import BaseCredit
from sparring.algo.credit.members import Member
from sparring.algo.credit.statistics import centred, standardised


class Grpo(BaseCredit, frozen=True, kw_only=True, tag="grpo"):
    """GRPO's outcome supervision: one advantage for all sampled tokens of a rollout.

        A_i = (r_i - mean(r)) / (std(r) + epsilon)      std over G - 1, as in the common implementations
        A_i =  r_i - mean(r)                            without `normalise`: Dr. GRPO

    Shao et al. (DeepSeekMath), arXiv 2402.03300, section 4.1.2; Liu et al. (Dr. GRPO), arXiv 2503.20783, section 3.2.
    Use it as the default for verifiable rewards. Without the division, a task's weight grows with the spread of its
    rewards.
    """

    least_members: ClassVar[int] = 2
    sees_one_group: ClassVar[bool] = True

    normalise: bool = True
    """Divide by the group's standard deviation."""

    epsilon: float = 1e-6
    """Constant added to the standard deviation."""

    def __post_init__(self) -> None:
        if not self.epsilon > 0:
            raise ValueError(f"epsilon must be above 0, got {self.epsilon}")

    def advantages(self, members: Sequence[Member]) -> list[float]:
        rewards = [m.reward for m in members]
        return standardised(rewards, epsilon=self.epsilon) if self.normalise else centred(rewards)
