"""Teachers with another tokenizer: what the student said is said to them in their own tokens, and compared where both
end.

Formula. The text of a turn is cut at every place where a token of the student and a token of the teacher end together.
Of such a span s the student's log-probability is the sum over its tokens, as the teacher's is over its own (the chain
rule; merging tokens by their product: GOLD, Patino et al. 2025, after ULD, arXiv 2402.12030). A span is one action of
the policy, so each of the student's tokens in it gets the span's whole gap as its own:

    teacher_t = behaviour_t + (log p(s) - sum of behaviour over s)      for every student's token t of s

so that teacher_t - logprob_t is log p(s) - log q(s) for tokens that the trained weights have sampled; with equal
tokenizers, where a span is a token, it is the teacher's log-probability. The end of a turn is a span of one token each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from sparring.algo.annotate.domain import teacher_of
from sparring.algo.annotate.teacher import Asker, Scoring, each
from sparring.algo.annotate.watch import Watch
from sparring.annotations import Annotation
from sparring.errors import refusal
from sparring.generation import ScoreRequest
from sparring.protocols import Renderer
from sparring.types import Message, Sample, Segment, ToolSpec

Span = tuple[range, range]
"""Tokens of the student and of the teacher that are the same text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tongue:
    """How a model's tokens are written: its renderer, its tokenizer, the token that ends its turn, and how many of them
    it reads at most."""

    renderer: Renderer
    encode: Callable[[str], Sequence[int]]
    end: int
    room: int


class AcrossTokenizers:
    """Implements `Annotator`: the annotation `teacher` by the formula above. A turn that cannot be said to the teacher
    (text that does not survive its tokenizer, that is too long for it, or that follows several tool calls at once) is
    compared with the policy as it sampled.

    Args:
        watch: knows the rows' groups.
        teachers: names of models by domain, as for `TeacherRows`.
        engines: by model name.
        asker: asks them.
        student: the student's.
        tongues: the teachers', by model name.
        tools: what the policy may call.
    """

    def __init__(
        self,
        watch: Watch,
        teachers: Mapping[str, str],
        engines: Mapping[str, Scoring],
        asker: Asker,
        *,
        student: Renderer,
        tongues: Mapping[str, Tongue],
        tools: Sequence[ToolSpec] = (),
    ) -> None:
        self._watch, self._asker = watch, asker
        self._teachers, self._engines = dict(teachers), dict(engines)
        self._student, self._tongues, self._tools = student, dict(tongues), tools

    async def annotate(self, samples: Sequence[Sample]) -> list[Sample]:
        """The rows, in order, with what their teachers say.

        Raises:
            BadInput: there is no teacher for a task, or a row does not begin with its task's messages.
            EngineError: a teacher refuses, or fails more often than it is asked again.
        """
        return await each(self._row, samples)

    async def _row(self, row: Sample) -> Sample:
        task = self._watch.group(row).task
        name = teacher_of(self._teachers, task)
        branch = self._watch.branches(row)[-1]
        if self._student.render(task.messages, self._tools).tokens != branch[0].tokens:
            do = "take a teacher that has the student's tokenizer"
            raise refusal(f"task {task.id}", "a world that opens with the task's own messages", "another prompt", do)
        said = list(row.logprobs or ())
        messages, start, told = list(task.messages), len(branch[0].tokens), True
        for segment in branch[1:]:
            end = start + len(segment.tokens)
            if told and any(row.weights["policy"][start:end]):
                said[start:end] = await self._turn(row, name, messages, segment, said[start:end])
            if segment.message is not None:
                messages.append(segment.message)
                told = (
                    told and len(segment.message.tool_calls) <= 1
                )  # of several answers, the record has the last alone
            start = end
        return replace(row.annotated(Annotation.TEACHER, tuple(said)), teacher=name)

    async def _turn(
        self, row: Sample, name: str, messages: Sequence[Message], segment: Segment, behaviour: list[float]
    ) -> list[float]:
        """What the teacher says of one turn, per token of the student."""
        tongue, tokens = self._tongues[name], segment.tokens
        ended = tokens[-1] in self._student.stop_ids
        body = tokens[:-1] if ended else tokens
        text = self._student.decode(body)
        theirs = tuple(tongue.encode(text)) if text else ()
        if tongue.renderer.decode(theirs) != text:
            return behaviour
        spans = aligned(ends(body, self._student.decode), ends(theirs, tongue.renderer.decode))
        if ended:
            spans.append((range(len(body), len(tokens)), range(len(theirs), len(theirs) + 1)))
        if not spans:
            return behaviour
        prompt = tongue.renderer.render(messages, self._tools).tokens
        whole = prompt + theirs + ((tongue.end,) if ended else ())
        if len(whole) > tongue.room:
            return behaviour
        id = f"{row.id}/{segment.index}/{name}"
        request = ScoreRequest(id=id, tokens=whole, first=len(prompt), temperature=row.temperature)
        scores = await self._asker.score(self._engines[name], request)
        found = list(behaviour)
        for ours, given in spans:
            gap = math.fsum(scores.logprobs[place] for place in given) - math.fsum(behaviour[place] for place in ours)
            for place in ours:
                found[place] = behaviour[place] + gap
        return found


def ends(tokens: Sequence[int], decode: Callable[[Sequence[int]], str]) -> list[int | None]:
    """Where in their text each of the tokens ends; None inside of a character."""
    text = decode(tokens)
    prefixes = [decode(tokens[: count + 1]) for count in range(len(tokens))]
    return [len(prefix) if text.startswith(prefix) else None for prefix in prefixes]


def aligned(ours: Sequence[int | None], theirs: Sequence[int | None]) -> list[Span]:
    """The shortest spans of two tokenizations of one text, in order, from where each token ends. Tokens without text of
    their own belong to the span before them, or to the first."""
    last = {}
    for side, places in enumerate((ours, theirs)):
        for place, end in enumerate(places):
            if end:
                last.setdefault(end, [None, None])[side] = place
    spans, at = [], (0, 0)
    for _, (here, there) in sorted(last.items()):
        if here is not None and there is not None:
            spans.append((range(at[0], here + 1), range(at[1], there + 1)))
            at = (here + 1, there + 1)
    return spans
