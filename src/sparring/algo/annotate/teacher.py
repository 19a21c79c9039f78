"""Asks teachers what they make of what the policy sampled: an engine each, chosen by the domain of the task."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from sparring.algo.annotate.domain import teacher_of
from sparring.algo.annotate.watch import Watch
from sparring.annotations import Annotation
from sparring.errors import EngineError, RequestRefused
from sparring.generation import ScoreRequest, Scores, TopRows
from sparring.types import Sample


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """What a teacher reads in the place of a row: `tokens`, in which the row's token t stands at t + `shift`."""

    tokens: tuple[int, ...]
    shift: int


class Scoring(Protocol):
    """An engine, as far as it judges given tokens."""

    async def score(self, request: ScoreRequest) -> Scores: ...


class Asker:
    """Asks engines for scores: so many at once, and again when one fails.

    Args:
        max_concurrent: requests under way at once.
        retries: how often one is repeated that an engine failed to answer; what it refuses is not.
        retry_delay_s: pause before the first repetition; doubles with each.
    """

    def __init__(self, *, max_concurrent: int = 64, retries: int = 2, retry_delay_s: float = 0.5) -> None:
        self._gate = asyncio.Semaphore(max_concurrent)
        self._retries, self._retry_delay_s = retries, retry_delay_s

    async def score(self, engine: Scoring, request: ScoreRequest) -> Scores:
        """What `engine` says.

        Raises:
            EngineError: it refuses, or failed once more than it is asked again.
        """
        async with self._gate:
            delay_s = self._retry_delay_s
            for _ in range(self._retries):
                try:
                    return await engine.score(request)
                except RequestRefused:
                    raise
                except EngineError:
                    await asyncio.sleep(delay_s)
                    delay_s *= 2
            return await engine.score(request)


class TeacherRows:
    """Implements `Annotator`: every row gets its teacher's name, and what that one says of the tokens that the policy
    term weighs, at the temperature they were sampled at: the annotation `teacher` and, where `top_k` is asked for,
    `Sample.tops`.

    Scores of a teacher that does not change are a function of the row, so a resumed run hears the same.

    Args:
        watch: knows the rows' groups.
        teachers: names of models by domain: the tag of a task, else its environment, else `*`.
        engines: by model name; a teacher that has none is computed elsewhere, and only named.
        asker: asks them.
        top_k: how many of the likeliest tokens are asked for.
        reading: what the teacher reads instead of the row, if it is something else; None where there is nothing for it
            to read: the row is then compared with the policy as it sampled.
        room: most tokens of such a reading; a longer one is none.
    """

    def __init__(
        self,
        watch: Watch,
        teachers: Mapping[str, str],
        engines: Mapping[str, Scoring],
        asker: Asker,
        *,
        top_k: int = 0,
        reading: Callable[[Sample], Reading | None] | None = None,
        room: int = 1 << 62,
    ) -> None:
        self._watch, self._asker = watch, asker
        self._teachers, self._engines = dict(teachers), dict(engines)
        self._top_k = top_k
        self._reading, self._room = reading, room

    async def annotate(self, samples: Sequence[Sample]) -> list[Sample]:
        """The rows, in order, with what their teachers say.

        Raises:
            BadInput: there is no teacher for a task.
            EngineError: a teacher refuses, or fails more often than it is asked again.
        """
        return await each(self._row, samples)

    async def _row(self, row: Sample) -> Sample:
        row = replace(row, teacher=teacher_of(self._teachers, self._watch.group(row).task))
        engine = self._engines.get(str(row.teacher))
        if engine is None:
            return row
        weighed = [place for place, weight in enumerate(row.weights["policy"]) if weight]
        reading = Reading(tokens=row.tokens, shift=0) if self._reading is None else self._reading(row)
        if reading is None or len(reading.tokens) > self._room:
            return _silent(row, self._top_k)
        request = ScoreRequest(
            id=f"{row.id}/{row.teacher}",
            tokens=reading.tokens[: weighed[-1] + reading.shift + 1],
            first=weighed[0] + reading.shift,
            temperature=row.temperature,
            top_k=self._top_k,
        )
        return _annotated(row, weighed, weighed[0], await self._asker.score(engine, request))


async def each(one: Callable[[Sample], Awaitable[Sample]], samples: Sequence[Sample]) -> list[Sample]:
    """`one` of every row, side by side, in order; the first error ends the others and is raised as it is."""
    tasks = [asyncio.ensure_future(one(row)) for row in samples]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _annotated(row: Sample, weighed: Sequence[int], first: int, scores: Scores) -> Sample:
    """The row with the scores of its tokens from `first` on."""
    said = [0.0] * len(row.tokens)
    tops: list[tuple[tuple[int, float], ...]] = [()] * len(row.tokens)
    for place in weighed:
        said[place] = scores.logprobs[place - first]
        if scores.top_ids:
            tops[place] = tuple(zip(scores.top_ids[place - first], scores.top_logprobs[place - first], strict=True))
    return replace(row.annotated(Annotation.TEACHER, tuple(said)), tops=TopRows.of(tops) if any(tops) else None)


def _silent(row: Sample, top_k: int) -> Sample:
    """A row that its teacher has nothing to say of: compared with the policy as it sampled, which is no difference."""
    nobody = TopRows(rows=(b"",) * len(row.tokens)) if top_k else None
    return replace(row.annotated(Annotation.TEACHER, row.logprobs or ()), tops=nobody)
