"""All kinds by name, and which of them can stand in one task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sparring.envs.instructions import case, counts, ends, marks, shape, words
from sparring.envs.instructions.kind import InstructionKind

KINDS: Mapping[str, InstructionKind] = {
    kind.name: kind for kind in (*counts.KINDS, *words.KINDS, *case.KINDS, *marks.KINDS, *shape.KINDS, *ends.KINDS)
}
"""Every kind by its name."""


def agree(kind: InstructionKind, other: InstructionKind) -> bool:
    """Return True if two kinds can stand in one task: they are different, and no claim of theirs is the same."""
    return kind.name != other.name and not kind.claims & other.claims


def companions(chosen: Sequence[str], among: Sequence[str]) -> list[str]:
    """Return the names `among` others that agree with all that were chosen."""
    return [name for name in among if all(agree(KINDS[name], KINDS[there]) for there in chosen)]


def can_stand_with(lead: str, among: Sequence[str], count: int) -> bool:
    """Return True if `count` kinds that agree, `lead` and others of `among`, can stand in one task."""

    def grown(chosen: tuple[str, ...]) -> bool:
        return len(chosen) >= count or any(grown((*chosen, name)) for name in companions(chosen, among))

    return grown((lead,))
