"""Annotators that need the trainer alone: a quantity under its weights, the name of a model beside it, its version."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from dataclasses import replace

from sparring.annotations import Annotation
from sparring.types import Sample

Forward = Callable[[Sequence[Sample], Set[str]], Awaitable[Sequence[Mapping[str, tuple[float, ...]]]]]
"""`Trainer.forward`."""


class TrainerQuantity:
    """Implements `Annotator`: a quantity of every weighted token under the weights that a trainer holds when the rows
    are annotated.

    Args:
        forward: of the trainer.
        name: the annotation, such as `Annotation.PROXIMAL` for the policy's own log-probabilities before an update of
            several optimiser steps.
        quantity: what `forward` computes.
    """

    def __init__(self, forward: Forward, name: Annotation, quantity: str = "logprob") -> None:
        self._forward, self._name, self._quantity = forward, name, quantity

    async def annotate(self, samples: Sequence[Sample]) -> Sequence[Sample]:
        """Return the rows with the annotation, 0.0 where no term weighs a token."""
        quantities = await self._forward(samples, {self._quantity})
        return [
            sample.annotated(self._name, values[self._quantity])
            for sample, values in zip(samples, quantities, strict=True)
        ]


class TeacherTag:
    """Implements `Annotator`: the name of the model that the trainer compares each row with, such as a reference that
    the trainer holds.

    Args:
        name: of the model, among the trainer's teachers.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    async def annotate(self, samples: Sequence[Sample]) -> Sequence[Sample]:
        """Return the rows with the name as their `teacher`."""
        return [replace(row, teacher=self._name) for row in samples]


class ProximalShare:
    """Implements `Annotator`: the estimated position of the trainer's log-probability before the update on the way from
    the recorded to the current one, as the annotation `proximal_share`.

        share = (v - v_b) / (v + 1 - v_b)       log proximal = log behaviour + share * (log pi - log behaviour)

    with v the version before the update, which makes v + 1, and v_b the one that sampled the token: decoupled PPO's
    anchor without its forward (AReaL, Fu et al., arXiv 2505.24298, and its log-linear approximation). Tokens of version
    v keep what was recorded; the staler a token, the nearer its anchor is to now.

    Args:
        version: returns the version of the weights that the trainer holds.
    """

    def __init__(self, version: Callable[[], int]) -> None:
        self._version = version

    async def annotate(self, samples: Sequence[Sample]) -> Sequence[Sample]:
        """Return the rows with the annotation, 0.0 where nothing was sampled."""
        now = self._version()
        return [row.annotated(Annotation.PROXIMAL_SHARE, _shares(row, now)) for row in samples]


def _shares(row: Sample, now: int) -> tuple[float, ...]:
    versions = row.versions or (-1,) * len(row.tokens)
    return tuple([(now - version) / (now + 1 - version) if 0 <= version <= now else 0.0 for version in versions])
