"""Annotators that need only the trainer: a quantity under its weights, the name of its teacher, its weight version."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from dataclasses import replace

from sparring.annotations import Annotation
from sparring.types import Sample

Forward = Callable[[Sequence[Sample], Set[str]], Awaitable[Sequence[Mapping[str, tuple[float, ...]]]]]
"""Type of `Trainer.forward`."""


class TrainerQuantity:
    """Writes a quantity of every weighted token under the trainer's current weights as the annotation `name`, such as
    `Annotation.PROXIMAL` for the policy's log-probabilities before an update of several optimiser steps. Implements
    `Annotator`."""

    def __init__(self, forward: Forward, name: Annotation, quantity: str = "logprob") -> None:
        self._forward, self._name, self._quantity = forward, name, quantity

    async def annotate(self, samples: Sequence[Sample]) -> Sequence[Sample]:
        """Return the rows with the annotation; 0.0 at tokens that no term weighs."""
        quantities = await self._forward(samples, {self._quantity})
        return [
            sample.annotated(self._name, values[self._quantity])
            for sample, values in zip(samples, quantities, strict=True)
        ]


class TeacherTag:
    """Writes on each row the name of its teacher, a model that the trainer holds, such as the reference. Implements
    `Annotator`."""

    def __init__(self, name: str) -> None:
        self._name = name

    async def annotate(self, samples: Sequence[Sample]) -> Sequence[Sample]:
        return [replace(row, teacher=self._name) for row in samples]


class ProximalShare:
    """Writes the annotation `proximal_share`, which places the proximal log-probability between the recorded and the
    current value. Implements `Annotator`.

        share = (v - v_b) / (v + 1 - v_b)       log proximal = log behaviour + share * (log pi - log behaviour)

    v is the version before the update and v + 1 the one after it; v_b is the version that sampled the token. This is
    decoupled PPO's anchor without its forward pass (AReaL, Fu et al., arXiv 2505.24298, and its log-linear
    approximation). For tokens of version v the anchor is the recorded log-probability; the staler a token, the nearer
    its anchor is to the current one.
    """

    def __init__(self, version: Callable[[], int]) -> None:
        self._version = version

    async def annotate(self, samples: Sequence[Sample]) -> Sequence[Sample]:
        """Return the rows with the annotation; 0.0 at tokens that were not sampled."""
        now = self._version()
        return [row.annotated(Annotation.PROXIMAL_SHARE, _shares(row, now)) for row in samples]


def _shares(row: Sample, now: int) -> tuple[float, ...]:
    versions = row.versions or (-1,) * len(row.tokens)
    return tuple([(now - version) / (now + 1 - version) if 0 <= version <= now else 0.0 for version in versions])
