"""Facts that every credit rule carries, with the values that most have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any, ClassVar

import msgspec

from sparring.algo.facts import Facts, name_of
from sparring.annotations import Annotation
from sparring.errors import refusal
from sparring.types import alike


class BaseCredit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="name"):
    """Base of the credit rules: the facts that the configuration, the stages and the pipeline read.

    A rule is one file: its equation, its settings as fields, and those of these facts in which it differs.
    `algo/rules.py` lists it; nothing else names it.
    """

    facts: ClassVar[Facts]
    """The rule's sources."""

    least_members: ClassVar[int]
    """Rollouts below which a group leaves the update, because there is nothing to compare."""

    sees_one_group: ClassVar[bool] = False
    """True if advantages depend only on one recorded group; False if they depend on the whole update, on annotations or
    on earlier updates."""

    counts_token_rewards: ClassVar[bool] = True
    """True if the rule reads rewards of single tokens (annotation `reward`)."""

    tells_turns_apart: ClassVar[bool] = False
    """True if the rule reads each turn's reward; False if it reads only their sum."""

    needs_nonnegative_rewards: ClassVar[bool] = False
    """True if a reward below 0 is an error."""

    needs_baselines: ClassVar[bool] = False
    """True if every task needs one additional greedy rollout (`Group.baselines`)."""

    reads: ClassVar[tuple[Annotation, ...]] = ()
    """Annotations that every row must have."""

    @property
    def implicit_scale(self) -> float | None:
        """Scale of an implicit process reward; None: the rule reads none."""
        return None

    @property
    def parts_read(self) -> tuple[str, ...]:
        """Return the parts of a score that the rule reads by name; none where it reads the reward."""
        return ()

    def unread(self, parts: Sequence[str]) -> list[str]:
        """List those of the `parts` of a score which change the reward and which the rule does not read."""
        return []

    def says_nothing(self, rewards: Sequence[float]) -> bool:
        """Return whether members of one role with these rewards all get an advantage of 0."""
        return alike(rewards)

    def open(self) -> Any:
        """Return an implementation of `protocols.Credit` without a denominator at the start of a run: the rule itself,
        unless it keeps state."""
        return self

    def state(self) -> Mapping[str, Any]:
        """Return what a resume needs: nothing, unless the rule keeps state."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`."""

    def check(self, group_size: int, written: Set[str]) -> None:
        """Refuse a stage in which the rule could not work.

        Args:
            group_size: rollouts per task.
            written: annotations that the stage writes.

        Raises:
            BadInput: every group of this size would leave the update, or an annotation that the rule reads is missing.
        """
        if group_size < self.least_members:
            expected = f"at least {self.least_members} rollouts to compare, with credit {name_of(self)!r}"
            do = "raise it, or choose a credit that works with one rollout, such as 'reinforce_plus_plus'"
            raise refusal("rollout.group_size", expected, str(group_size), do)
        missing = [name for name in self.reads if name not in written]
        if missing:
            expected = f"a credit that does not need the annotation '{missing[0]}', which this stage does not compute"
            raise refusal("algo.credit", expected, repr(name_of(self)), "choose another; docs/algorithms.md lists them")
