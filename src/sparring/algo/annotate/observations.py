"""Observations as targets: tokens that tools answered get weight in the imitate term."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import replace

from sparring.algo.annotate.provenance import SampleProvenance
from sparring.types import Sample


class ObservationTargets:
    """Implements `Annotator`: every token that a tool's answer added, with the template around it, has weight 1 in the
    imitate term, in the first row that contains it (ECHO, arXiv 2605.24517: the policy term's loss + lambda *
    cross-entropy of the environment's tokens, a mean over them; lambda is the term's scale).

    The trainer cuts a row behind its last weighted token, so an answer at the end of a row is trained too.
    """

    def __init__(self, provenance: SampleProvenance) -> None:
        self._provenance = provenance

    async def annotate(self, samples: Sequence[Sample]) -> list[Sample]:
        """Return the rows with weights of the imitate term."""
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
    """List the annotator for a loss of this scale; none where the scale is 0."""
    return [ObservationTargets(provenance)] if scale else []
