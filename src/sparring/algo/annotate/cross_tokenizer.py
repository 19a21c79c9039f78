"""Teachers with another tokenizer: they score the text of the student's turns in their own tokens, and the scores are
compared at common token boundaries.

Formula. The text of a turn is cut wherever a token of the student and a token of the teacher end at the same character.
The student's log-probability of such a span s is the sum over its tokens, the teacher's the sum over its own (chain
rule; merging tokens by their product: GOLD, Patino et al. 2025, after ULD, arXiv 2402.12030). A span counts as one
action of the policy, so each of the student's tokens in it gets the gap of the whole span:

    teacher_t = behaviour_t + (log p(s) - sum of behaviour over s)      for every student token t of s

For tokens that the trained weights sampled, teacher_t - logprob_t is then log p(s) - log q(s). With equal tokenizers
each span is one token, and teacher_t is the teacher's log-probability. The end of a turn is a span of its own: one
token of the student and one of the teacher.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from sparring.algo.annotate.domain import teacher_of
from sparring.algo.annotate.provenance import SampleProvenance
from sparring.algo.annotate.teacher import ScoreClient, ScoringEngine, annotate_rows
from sparring.annotations import Annotation
from sparring.errors import refusal
from sparring.generation import ScoreRequest
from sparring.protocols import Renderer
from sparring.types import Sample, Segment

Span = tuple[range, range]
"""Token ranges of the student and of the teacher that cover the same text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TeacherTokenizer:
    """Text format of a teacher: `end` is the id that ends a turn, `max_tokens` the teacher's context length."""

    renderer: Renderer
    encode: Callable[[str], Sequence[int]]
    end: int
    max_tokens: int


class AcrossTokenizers:
    """Writes the annotation `teacher` by the formula above. Implements `Annotator`.

    A turn cannot be scored if its text does not survive the teacher's tokenizer, if its prompt is longer than the
    teacher's context, or if it follows several simultaneous tool calls. Such a turn gets its recorded log-probabilities
    as the teacher's: a gap of 0.

    `teachers` as in `TeacherRows`; `tokenizers` are the teachers' text formats, by model name.
    """

    def __init__(
        self,
        provenance: SampleProvenance,
        teachers: Mapping[str, str],
        engines: Mapping[str, ScoringEngine],
        client: ScoreClient,
        *,
        student: Renderer,
        tokenizers: Mapping[str, TeacherTokenizer],
    ) -> None:
        self._provenance, self._client = provenance, client
        self._teachers, self._engines = dict(teachers), dict(engines)
        self._student, self._tokenizers = student, dict(tokenizers)

    async def annotate(self, samples: Sequence[Sample]) -> list[Sample]:
        """Return the rows, in order, with their teachers' names and scores; refuse a row that does not begin with its
        task's messages (`BadInput`)."""
        return await annotate_rows(self._row, samples)

    async def _row(self, row: Sample) -> Sample:
        task = self._provenance.group(row).task
        name = teacher_of(self._teachers, task)
        branch = self._provenance.branches(row)[-1]
        tools = branch[0].tools or ()
        if self._student.render(task.messages, tools).tokens != branch[0].tokens:
            expected = "an environment whose first prompt is the task's messages"
            fix = "take a teacher that has the student's tokenizer"
            raise refusal(f"task {task.id}", expected, "another prompt", fix)
        logprobs = list(row.logprobs or ())
        messages, start, can_render = list(task.messages), len(branch[0].tokens), True
        for segment in branch[1:]:
            end = start + len(segment.tokens)
            tools = tools if segment.tools is None else segment.tools
            if can_render and any(row.weights["policy"][start:end]):
                prompt = self._tokenizers[name].renderer.render(messages, tools).tokens
                logprobs[start:end] = await self._turn(row, name, prompt, segment, logprobs[start:end])
            if segment.message is not None:
                messages.append(segment.message)
                # the record keeps only the last of several tool answers to one turn
                can_render = can_render and len(segment.message.tool_calls) <= 1
            start = end
        return replace(row.annotated(Annotation.TEACHER, tuple(logprobs)), teacher=name)

    async def _turn(
        self, row: Sample, name: str, prompt: tuple[int, ...], segment: Segment, behaviour: list[float]
    ) -> list[float]:
        """Compute teacher_t of the module's formula for each of the student's tokens in one turn. `prompt` is the
        turn's prompt in the teacher's tokens."""
        teacher, tokens = self._tokenizers[name], segment.tokens
        has_end = tokens[-1] in self._student.stop_ids
        body = tokens[:-1] if has_end else tokens
        text = self._student.decode(body)
        encoded = tuple(teacher.encode(text)) if text else ()
        if teacher.renderer.decode(encoded) != text:
            return behaviour
        spans = aligned(ends(body, self._student.decode), ends(encoded, teacher.renderer.decode))
        if has_end:
            spans.append((range(len(body), len(tokens)), range(len(encoded), len(encoded) + 1)))
        if not spans:
            return behaviour
        teacher_tokens = prompt + encoded + ((teacher.end,) if has_end else ())
        if len(teacher_tokens) > teacher.max_tokens:
            return behaviour
        id = f"{row.id}/{segment.index}/{name}"
        request = ScoreRequest(id=id, tokens=teacher_tokens, first=len(prompt), temperature=row.temperature)
        scores = await self._client.score(self._engines[name], request)
        values = list(behaviour)
        for student_span, teacher_span in spans:
            gap = math.fsum(scores.logprobs[at] for at in teacher_span) - math.fsum(
                behaviour[at] for at in student_span
            )
            for at in student_span:
                values[at] = behaviour[at] + gap
        return values


def ends(tokens: Sequence[int], decode: Callable[[Sequence[int]], str]) -> list[int | None]:
    """Return the character position at which each token ends in the text; None if it ends inside a character."""
    text = decode(tokens)
    prefixes = [decode(tokens[: count + 1]) for count in range(len(tokens))]
    return [len(prefix) if text.startswith(prefix) else None for prefix in prefixes]


def aligned(student: Sequence[int | None], teacher: Sequence[int | None]) -> list[Span]:
    """Return the shortest spans that two tokenizations of one text share, in order; both are given by `ends`.

    Tokens without text of their own belong to the span before them, or to the first.
    """
    last: dict[int, list[int | None]] = {}
    for side, token_ends in enumerate((student, teacher)):
        for token, end in enumerate(token_ends):
            if end:
                last.setdefault(end, [None, None])[side] = token
    spans, at = [], (0, 0)
    for _, (student_token, teacher_token) in sorted(last.items()):
        if student_token is not None and teacher_token is not None:
            spans.append((range(at[0], student_token + 1), range(at[1], teacher_token + 1)))
            at = (student_token + 1, teacher_token + 1)
    return spans
