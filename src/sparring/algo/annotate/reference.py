"""The log-probabilities of a model that is not trained."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from sparring.generation import ScoreRequest
from sparring.protocols import Engine
from sparring.types import Sample

REFERENCE = "reference"
"""The annotation's name."""


class Reference:
    """Implements `Annotator`: `reference` holds, for every token from the first that some term weighs, its log-probability under
    what an engine serves, at the sample's temperature; 0 before that.

    Sampling that truncates is not known to it: what was kept of the vocabulary is not what the other model would have kept.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def annotate(self, samples: Sequence[Sample]) -> list[Sample]:
        """The samples with the annotation.

        Raises:
            EngineError: the engine failed.
        """
        return list(await asyncio.gather(*map(self._one, samples)))

    async def _one(self, sample: Sample) -> Sample:
        weighed = [place for values in sample.weights.values() for place, weight in enumerate(values) if weight]
        first = min(weighed, default=len(sample.tokens))
        known: tuple[float, ...] = ()
        if weighed:
            request = ScoreRequest(
                id=f"{REFERENCE}/{sample.id}", tokens=sample.tokens, first=first, temperature=sample.temperature
            )
            known = (await self._engine.score(request)).logprobs
        return replace(sample, annotations={**sample.annotations, REFERENCE: (0.0,) * first + known})
