"""Compared or labelled replies -> rows and batches of the preference and value terms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from sparring.annotations import Annotation
from sparring.batch.denominators import denominators
from sparring.errors import refusal
from sparring.types import PAIR_SHARE, Batch, Sample

CHOSEN, REJECTED, MISMATCHED = 1.0, -1.0, 0.0
"""`Sample.label`."""

BEHIND = 0
"""The id of a token that stands behind the end of a text. Its value is what the text is worth; it is never computed
itself."""


def reply(
    tokens: Sequence[int],
    is_reply: Sequence[bool],
    *,
    id: str,
    group: str,
    label: float,
    share: float,
    imitate: bool = False,
) -> Sample:
    """Make a row of the preference term from a rendered reply: `share` is spread evenly over its tokens.

    Args:
        tokens: prompt and reply, ids [T].
        is_reply: for each whether it belongs to the reply [T].
        id: names the reply in messages.
        group: the pair that it is a side of.
        label: CHOSEN, REJECTED or MISMATCHED.
        share: what the whole reply weighs.
        imitate: whether the imitate term weighs its tokens too, each with 1.

    Raises:
        BadInput: there is no token to judge, or the first one, which nothing predicts, is among them.
    """
    count = sum(is_reply)
    if not count or is_reply[0]:
        got = "none" if not count else "a reply without a prompt"
        raise refusal(f"preference {id}", "a prompt and a reply", got, "correct the row or leave it out")
    weights = {"preference": tuple(share / count if mark else 0.0 for mark in is_reply)}
    if imitate:
        weights["imitate"] = tuple(1.0 if mark else 0.0 for mark in is_reply)
    return Sample(id=id, group=group, source="expert", tokens=tuple(tokens), weights=weights, label=label)


def whole_text(tokens: Sequence[int], *, id: str, group: str, label: float, margin: float = 0.0) -> Sample:
    """Make one side of a pair for a reward model: the value behind the last token counts.

    Args:
        tokens: prompt and reply, ids [T].
        id: names the text in messages.
        group: the pair that it is a side of.
        label: CHOSEN or REJECTED.
        margin: how much more the chosen side of this pair should be worth at least.
    """
    behind = (0.0,) * len(tokens)
    return Sample(
        id=id,
        group=group,
        source="expert",
        tokens=(*tokens, BEHIND),
        weights={"preference": (*behind, PAIR_SHARE)},
        annotations={Annotation.MARGIN: (*behind, margin)},
        label=label,
    )


def labelled_steps(tokens: Sequence[int], ends: Mapping[int, float], *, id: str) -> Sample:
    """Make a row of a labelled solution for a process reward model.

    Args:
        tokens: prompt and solution, ids [T].
        ends: by how many tokens have been read at the end of a step (1 to T), whether the step is right (0 to 1).
        id: names the solution in messages.
    """
    places = range(len(tokens) + 1)
    return Sample(
        id=id,
        group=id,
        source="expert",
        tokens=(*tokens, BEHIND),
        weights={"value": tuple(1.0 if count in ends else 0.0 for count in places)},
        annotations={Annotation.STEP_LABEL: tuple(ends.get(count, 0.0) for count in places)},
    )


def mismatched(row: Sample, other: Sample, longest: int) -> Sample:
    """Join the prompt of `row` and the reply of `other`, of at most `longest` tokens, for KTO's estimate of the
    divergence."""
    first, start = (
        next(position for position, weight in enumerate(r.weights["preference"]) if weight) for r in (row, other)
    )
    is_reply = (*(False,) * first, *(weight != 0 for weight in other.weights["preference"][start:]))[:longest]
    tokens = (row.tokens[:first] + other.tokens[start:])[:longest]
    return reply(tokens, is_reply, id=f"{row.id} with {other.id}", group=row.group, label=MISMATCHED, share=1.0)


def preference_batch(units: Sequence[Sequence[Sample]], *, step: int, model: str) -> Batch:
    """Make the batch of one optimiser step on units of this module's rows, such as pairs. Nothing was sampled, so the
    account is empty.

    A unit that is there twice, where one epoch ends and the next begins, is two: groups are named anew.
    """
    rows = [replace(row, group=f"{number}/{row.group}") for number, unit in enumerate(units) for row in unit]
    return Batch(step=step, model=model, rows=tuple(rows), denominators=denominators(rows), publish=False)
