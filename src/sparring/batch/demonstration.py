"""Demonstrations -> rows and batches of the imitate term."""

from __future__ import annotations

from collections.abc import Sequence

from sparring.batch.denominators import denominators
from sparring.errors import refusal
from sparring.types import Batch, Sample


def demonstration(tokens: Sequence[int], sampled: Sequence[bool], id: str) -> Sample:
    """Return the row of one rendered demonstration, with weight 1 on every token that the model would have sampled.

    Args:
        tokens: [T] ids of the rendered conversation.
        sampled: [T] True for tokens of an assistant body or its end (`protocols.Rendered.sampled`).

    Raises:
        BadInput: `tokens` and `sampled` differ in length, no token is marked, or the first token is marked, which no
            earlier token predicts.
    """
    if len(tokens) != len(sampled):
        raise refusal(f"demonstration {id}", f"{len(tokens)} marks", str(len(sampled)), "mark every rendered token")
    if not any(sampled):
        raise refusal(f"demonstration {id}", "an assistant message", "none", "add one or leave the row out")
    if sampled[0]:
        raise refusal(
            f"demonstration {id}", "a prompt token first", "a sampled one", "begin with a prompt or a start token"
        )
    weights = {"imitate": tuple(1.0 if mark else 0.0 for mark in sampled)}
    return Sample(id=id, group=id, source="expert", tokens=tuple(tokens), weights=weights)


def demonstration_batch(rows: Sequence[Sample], *, step: int, model: str) -> Batch:
    """Return the batch of one optimiser step on demonstrations. Nothing was sampled, so the account is empty."""
    return Batch(step=step, model=model, rows=tuple(rows), denominators=denominators(rows), publish=False)
