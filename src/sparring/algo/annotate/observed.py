"""What the world answered, to be predicted: observation tokens get weight in the imitate term."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sparring.algo.annotate.watch import Watch
from sparring.types import Sample


class Observed:
    """Implements `Annotator`: every token that a tool's answer added, with the template around it, has weight 1 in the
    imitate term, in the first row that contains it (ECHO, arXiv 2605.24517: the policy term's loss + lambda *
    cross-entropy of the environment's tokens, a mean over them; lambda is the term's scale).

    Of a row only what stands before its last sampled token is known to the trainer as context; an answer that nothing
    follows is trained all the same.
    """

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    async def annotate(self, samples: Sequence[Sample]) -> list[Sample]:
        """The rows with weights of the imitate term."""
        return [self._row(row) for row in samples]

    def _row(self, row: Sample) -> Sample:
        *earlier, own = self._watch.branches(row)
        known = {segment.index for branch in earlier for segment in branch}
        weights: list[float] = []
        for segment in own:
            new = segment.source == "tool" and segment.index not in known
            weights += [float(new)] * len(segment.tokens)
        return replace(row, weights={**row.weights, "imitate": tuple(weights)}) if any(weights) else row


def observing(watch: Watch, scale: float) -> list[Observed]:
    """The annotator for a loss of this scale; none where that is 0."""
    return [Observed(watch)] if scale else []
