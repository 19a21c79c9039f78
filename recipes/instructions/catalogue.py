"""Catalogue of all kinds of instructions, with their compatibility within a task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import case
import counts
import ends
import marks
import shape
import words
from kind import InstructionKind

KINDS: Mapping[str, InstructionKind] = {
    kind.name: kind for kind in (*counts.KINDS, *words.KINDS, *case.KINDS, *marks.KINDS, *shape.KINDS, *ends.KINDS)
}
"""Kinds by name."""


def agree(kind: InstructionKind, other: InstructionKind) -> bool:
    """Return True if two kinds can be in one task: they differ and share no claim."""
    return kind.name != other.name and not kind.claims & other.claims


def companions(chosen: Sequence[str], among: Sequence[str]) -> list[str]:
    """Return the names in `among` that are compatible with all of `chosen`."""
    return [name for name in among if all(agree(KINDS[name], KINDS[other]) for other in chosen)]


def can_stand_with(lead: str, among: Sequence[str], count: int) -> bool:
    """Return True if `lead` and others from `among` make `count` compatible kinds."""

    def grown(chosen: tuple[str, ...]) -> bool:
        return len(chosen) >= count or any(grown((*chosen, name)) for name in companions(chosen, among))

    return grown((lead,))
