"""Compared or labelled replies -> rows and batches of the preference and value terms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from sparring.annotations import Annotation
from sparring.batch.denominators import denominators
from sparring.errors import refusal
from sparring.types import PAIR_SHARE, Batch, Sample

CHOSEN, REJECTED, MISMATCHED = 1.0, -1.0, 0.0
"""Values of `Sample.label`."""

BEHIND = 0
"""Id of the token appended to a text. The value at this token is that of the whole text before it; the model never
reads the token itself."""


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
    """Return a row of the preference term from a rendered reply, with `share` spread evenly over its tokens.

    Args:
        tokens: [T] ids of prompt and reply.
        is_reply: [T] True for tokens of the reply.
        group: name of the pair that the reply belongs to.
        label: CHOSEN, REJECTED or MISMATCHED.
        imitate: also give each of its tokens weight 1 in the imitate term.

    Raises:
        BadInput: no token belongs to the reply, or the first token does, which no earlier token predicts.
    """
    count = sum(is_reply)
    if not count or is_reply[0]:
        found = "none" if not count else "a reply without a prompt"
        raise refusal(f"preference {id}", "a prompt and a reply", found, "correct the row or leave it out")
    weights = {"preference": tuple(share / count if mark else 0.0 for mark in is_reply)}
    if imitate:
        weights["imitate"] = tuple(1.0 if mark else 0.0 for mark in is_reply)
    return Sample(id=id, group=group, source="expert", tokens=tuple(tokens), weights=weights, label=label)


def whole_text(tokens: Sequence[int], *, id: str, group: str, label: float, margin: float = 0.0) -> Sample:
    """Return one side of a pair for a reward model, weighted at the token appended after the text.

    Args:
        tokens: [T] ids of prompt and reply.
        group: name of the pair that the text belongs to.
        label: CHOSEN or REJECTED.
        margin: smallest difference of rewards that the pair should have.
    """
    zeros = (0.0,) * len(tokens)
    return Sample(
        id=id,
        group=group,
        source="expert",
        tokens=(*tokens, BEHIND),
        weights={"preference": (*zeros, PAIR_SHARE)},
        annotations={Annotation.MARGIN: (*zeros, margin)},
        label=label,
    )


def labelled_steps(tokens: Sequence[int], ends: Mapping[int, float], *, id: str) -> Sample:
    """Return the row of a labelled solution for a process reward model.

    Args:
        tokens: [T] ids of prompt and solution.
        ends: label of each step, 0 (wrong) to 1 (right), by the number of tokens at its end (1 to T).
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
    """Return the row of `row`'s prompt and `other`'s reply, cut to `longest` tokens, for KTO's estimate of the KL."""
    first, start = (
        next(position for position, weight in enumerate(r.weights["preference"]) if weight) for r in (row, other)
    )
    is_reply = (*(False,) * first, *(weight != 0 for weight in other.weights["preference"][start:]))[:longest]
    tokens = (row.tokens[:first] + other.tokens[start:])[:longest]
    return reply(tokens, is_reply, id=f"{row.id} with {other.id}", group=row.group, label=MISMATCHED, share=1.0)


def preference_batch(units: Sequence[Sequence[Sample]], *, step: int, model: str) -> Batch:
    """Return the batch of one optimiser step on `units`, such as pairs, each with rows of this module. Nothing was
    sampled, so the account is empty.

    A unit that occurs twice, because one epoch ends and the next begins, counts as two units: groups get new names.
    """
    rows = [replace(row, group=f"{number}/{row.group}") for number, unit in enumerate(units) for row in unit]
    return Batch(step=step, model=model, rows=tuple(rows), denominators=denominators(rows), publish=False)
