"""Observation targets: tokens of tool answers get weight in the imitate term."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import replace

from sparring.algo.annotate.provenance import SampleProvenance
from sparring.types import Sample


class ObservationTargets:
    """Sets weight 1 in the imitate term on the tokens of tool answers and of the chat template around them. Implements
    `Annotator`.

    A token that several rows share gets this weight only in the first of them. The loss is ECHO's (arXiv 2605.24517):
    policy loss + lambda * mean cross-entropy of the environment's tokens, with lambda the scale of the term. The
    trainer cuts a row after its last weighted token, so an answer at the end of a row is trained too.
    """

    def __init__(self, provenance: SampleProvenance) -> None:
        self._provenance = provenance

    async def annotate(self, samples: Sequence[Sample]) -> list[Sample]:
        ids = {row.id for row in samples}
        return [self._row(row, ids) for row in samples]

    def _row(self, row: Sample, ids: Set[str]) -> Sample:
        *earlier, branch = self._provenance.branches(row)
        rows = [other for number, other in enumerate(earlier) if f"{row.trajectory}#{number}" in ids]
        shared = {segment.index for other in rows for segment in other}
        weights: list[float] = []
        for segment in branch:
            is_target = segment.source == "tool" and segment.index not in shared
            weights += [float(is_target)] * len(segment.tokens)
        return replace(row, weights={**row.weights, "imitate": tuple(weights)}) if any(weights) else row


def observation_targets(provenance: SampleProvenance, scale: float) -> list[ObservationTargets]:
    """List the annotator for a loss of this scale; empty for a scale of 0."""
    return [ObservationTargets(provenance)] if scale else []
