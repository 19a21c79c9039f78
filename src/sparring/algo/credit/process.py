"""GRPO with process supervision."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import msgspec

from sparring.algo.credit.members import Member, per_turn, returns
from sparring.algo.credit.statistics import standardised
from sparring.algo.credit.turn_level import want_turns
from sparring.types import Group, Sample


class Process(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="process", tag_field="name"):
    """GRPO's process supervision: a token is credited with all normalised step rewards from its step on.

        r~_i,k = (r_i,k - mean(r)) / (std(r) + epsilon)      over all steps of all members
        A_i,t  = sum of r~_i,k over the steps k that end at or after token t

    Shao et al. (DeepSeekMath), arXiv 2402.03300, section 4.1.3. A step is a turn, its reward `Score.per_turn`, from a process
    reward model or the world; the outcome counts only as far as it is among them. Use it with a process reward model. A group
    whose steps are one in all leaves the update.
    """

    least_members: ClassVar[int] = 1

    epsilon: float = 1e-6
    """Added to the standard deviation."""

    def credit(self, groups: Sequence[Group], samples: Sequence[Sequence[Sample]]) -> list[list[Sample]]:
        """Set advantages; see `protocols.Credit`.

        Raises:
            BadInput: no score of the update says what turns earned.
        """
        want_turns(groups, "process")
        return per_turn(groups, samples, self._role)

    def _role(self, role: Sequence[Member]) -> list[list[float]] | None:
        turns = [m.per_turn() for m in role]
        if sum(map(len, turns)) < 2:
            return None
        normal = iter(standardised([reward for of in turns for reward in of], epsilon=self.epsilon))
        return [returns([next(normal) for _ in of], 1.0) for of in turns]
