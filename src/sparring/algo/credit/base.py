"""Base of the credit rules, with the defaults of their class variables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any, ClassVar

from sparring.algo.base import NamedRule, name_of
from sparring.algo.credit.members import Member, per_trajectory
from sparring.annotations import Annotation
from sparring.errors import refusal
from sparring.types import Group, Sample, alike


class BaseCredit(NamedRule, frozen=True, kw_only=True):
    """Base of the credit rules: class variables and methods that the configuration, the stages and the pipeline read.

    A rule is one file: its equation, its settings as fields, and the class variables in which it differs from the
    defaults below. `algo/rules.py` lists it; nothing else names it. Implements `Credit`, except `denominator`.
    """

    least_members: ClassVar[int] = 1
    """Smallest group that the rule can compare. A recipe's groups have at least this size; one that failures made
    smaller is still credited."""

    sees_one_group: ClassVar[bool] = False
    """True if advantages depend on one recorded group only; False if they depend on the whole update, on annotations or
    on earlier updates."""

    counts_token_rewards: ClassVar[bool] = True
    """True if the rule reads rewards of single tokens (annotation `reward`)."""

    tells_turns_apart: ClassVar[bool] = False
    """True if the rule reads each turn's reward; False if it reads only their sum."""

    needs_nonnegative_rewards: ClassVar[bool] = False
    """True if a reward below 0 is an error."""

    needs_baselines: ClassVar[bool] = False
    """True if every task needs an additional greedy rollout (`Group.baselines`)."""

    reads: ClassVar[tuple[Annotation, ...]] = ()
    """Annotations that every row must have."""

    @property
    def implicit_scale(self) -> float | None:
        """Scale of an implicit process reward; None for rules that use none."""
        return None

    @property
    def parts_read(self) -> tuple[str, ...]:
        """Return the named parts of a score that the rule reads; empty if it reads the reward."""
        return ()

    def unread(self, parts: Sequence[str]) -> list[str]:
        """List the `parts` that change the reward but that the rule does not read."""
        return []

    def says_nothing(self, rewards: Sequence[float]) -> bool:
        """Return whether all advantages are 0 for members of one role with these rewards."""
        return alike(rewards)

    def open(self) -> Any:
        """Return an object with the rule's initial state, which implements `protocols.Credit` except `denominator`. A
        stateless rule returns itself."""
        return self

    def credit(self, groups: Sequence[Group], samples: Sequence[Sequence[Sample]]) -> list[list[Sample]]:
        """Set one advantage for all tokens of a trajectory (`advantages`); see `protocols.Credit`."""
        return per_trajectory(groups, samples, self.advantages)

    def advantages(self, members: Sequence[Member]) -> Sequence[float] | None:
        """Compute the advantage of each member of one role of a group; None if they cannot be compared.

        Rules that set an advantage per turn or token override `credit` instead.
        """
        raise NotImplementedError(f"{type(self).__name__} needs a method advantages(self, members)")

    def state(self) -> Mapping[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Do nothing: a rule without state has nothing to restore."""

    def check(self, group_size: int, written: Set[Annotation]) -> None:
        """Refuse a stage in which the rule cannot work; `written` are the annotations that the stage writes.

        Raises:
            BadInput: every group of this size would leave the update, or the stage does not write an annotation that
                the rule reads.
        """
        if group_size < self.least_members:
            expected = f"at least {self.least_members} rollouts to compare, with credit {name_of(self)!r}"
            fix = "raise it, or choose a credit that works with one rollout, such as 'reinforce_plus_plus'"
            raise refusal("rollout.group_size", expected, str(group_size), fix)
        missing = [name for name in self.reads if name not in written]
        if missing:
            expected = f"a credit that does not need the annotation '{missing[0]}', which this stage does not compute"
            raise refusal("algo.credit", expected, repr(name_of(self)), "choose another; docs/algorithms/ lists them")
