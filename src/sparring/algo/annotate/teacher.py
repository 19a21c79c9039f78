"""Teachers' scores of sampled tokens: one engine per teacher, chosen by the task's domain."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from sparring.algo.annotate.domain import teacher_of
from sparring.algo.annotate.provenance import SampleProvenance
from sparring.annotations import Annotation
from sparring.backoff import retry_pause_s
from sparring.errors import EngineError, RequestRefused
from sparring.generation import ScoreRequest, Scores, TopRows
from sparring.types import Sample


@dataclass(frozen=True, kw_only=True, slots=True)
class TeacherInput:
    """Tokens that a teacher reads instead of a row: the row's token t is `tokens[t + shift]`."""

    tokens: tuple[int, ...]
    shift: int


class ScoringEngine(Protocol):
    """Engine that scores given tokens; the part of `Engine` that teachers need."""

    async def score(self, request: ScoreRequest) -> Scores:
        """Return log-probabilities of the request's tokens."""
        ...


class ScoreClient:
    """Client of scoring engines that bounds concurrent requests and retries failed ones.

    Args:
        max_concurrent: largest number of requests in flight.
        retries: number of retries of a failed request; a refused request is not retried.
        retry_delay_s: upper limit of the pause before the first retry, in seconds; it doubles with each retry. A hash
            of the request's id picks the pause, uniformly below the limit.
    """

    def __init__(self, *, max_concurrent: int = 64, retries: int = 2, retry_delay_s: float = 0.5) -> None:
        self._slots = asyncio.Semaphore(max_concurrent)
        self._retries, self._retry_delay_s = retries, retry_delay_s

    async def score(self, engine: ScoringEngine, request: ScoreRequest) -> Scores:
        """Return the scores of a request; raise the engine's error if it refuses the request, or all retries fail."""
        async with self._slots:
            for retry in range(1, self._retries + 1):
                try:
                    return await engine.score(request)
                except RequestRefused:
                    raise
                except EngineError:
                    await asyncio.sleep(retry_pause_s(self._retry_delay_s, retry, request.id))
            return await engine.score(request)


class TeacherRows:
    """Writes on each row the name of its teacher and the teacher's scores of tokens with policy weight. Implements
    `Annotator`.

    The scores are log-probabilities at the row's sampling temperature: the annotation `teacher` and, with `top_k`,
    `Sample.tops`. Scores of a fixed teacher depend only on the row, so a resumed run gets the same ones.

    Args:
        teachers: names of the teachers' models by domain, see `teacher_of`: a task's tag, its environment or `*`.
        engines: scoring engines by model name. The row of a teacher without an engine gets only the teacher's name,
            because the trainer computes the scores.
        reading: function that builds the teacher's input for a row, by default the row itself. If it returns None, the
            row keeps its recorded log-probabilities as the teacher's.
        max_tokens: maximum length of an input; a longer one is treated as if `reading` had returned None.
    """

    def __init__(
        self,
        provenance: SampleProvenance,
        teachers: Mapping[str, str],
        engines: Mapping[str, ScoringEngine],
        client: ScoreClient,
        *,
        top_k: int = 0,
        reading: Callable[[Sample], TeacherInput | None] | None = None,
        max_tokens: int = 1 << 62,
    ) -> None:
        self._provenance, self._client = provenance, client
        self._teachers, self._engines = dict(teachers), dict(engines)
        self._top_k = top_k
        self._reading, self._max_tokens = reading, max_tokens

    async def annotate(self, samples: Sequence[Sample]) -> list[Sample]:
        return await annotate_rows(self._row, samples)

    async def _row(self, row: Sample) -> Sample:
        row = replace(row, teacher=teacher_of(self._teachers, self._provenance.group(row).task))
        engine = self._engines.get(str(row.teacher))
        if engine is None:
            return row
        weighted = [position for position, weight in enumerate(row.weights["policy"]) if weight]
        prompt = TeacherInput(tokens=row.tokens, shift=0) if self._reading is None else self._reading(row)
        if prompt is None or len(prompt.tokens) > self._max_tokens:
            return _without_teacher(row, self._top_k)
        request = ScoreRequest(
            id=f"{row.id}/{row.teacher}",
            tokens=prompt.tokens[: weighted[-1] + prompt.shift + 1],
            first=weighted[0] + prompt.shift,
            temperature=row.temperature,
            top_k=self._top_k,
        )
        return _with_scores(row, weighted, weighted[0], await self._client.score(engine, request))


async def annotate_rows(annotate: Callable[[Sample], Awaitable[Sample]], samples: Sequence[Sample]) -> list[Sample]:
    """Run `annotate` on all rows concurrently and return the results in order. The first error cancels the others and
    is raised unchanged."""
    tasks = [asyncio.ensure_future(annotate(row)) for row in samples]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _with_scores(row: Sample, weighted: Sequence[int], first: int, scores: Scores) -> Sample:
    """Return the row with scores at its `weighted` positions; `scores` begin at position `first`."""
    logprobs = [0.0] * len(row.tokens)
    tops: list[tuple[tuple[int, float], ...]] = [()] * len(row.tokens)
    for position in weighted:
        logprobs[position] = scores.logprobs[position - first]
        if scores.top_ids:
            ids, values = scores.top_ids[position - first], scores.top_logprobs[position - first]
            tops[position] = tuple(zip(ids, values, strict=True))
    row = row.annotated(Annotation.TEACHER, tuple(logprobs))
    return replace(row, tops=TopRows.of(tops) if any(tops) else None)


def _without_teacher(row: Sample, top_k: int) -> Sample:
    """Return the row with its recorded log-probabilities as the teacher's: a gap of 0."""
    tops = TopRows(rows=(b"",) * len(row.tokens)) if top_k else None
    return replace(row.annotated(Annotation.TEACHER, row.logprobs or ()), tops=tops)
