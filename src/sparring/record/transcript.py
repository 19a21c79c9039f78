"""Sessions of text: the replies of an expert, or of a server of chat completions."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from sparring.errors import LimitReached, PromptTooLong
from sparring.generation import Constraint
from sparring.record.branches import Transcript
from sparring.record.lines import place_named
from sparring.record.order import conversation
from sparring.record.session import OpenSession, trajectory_id
from sparring.record.text_tree import TextTree
from sparring.record.token_counts import CountedPrompt, ImitatedIds, Imitator
from sparring.reply import ReplyHead, ReplyRequest, ReplyStream, SampledReply, ShownReply
from sparring.types import Message, Outcome, Segment, Source, Task, Timing, ToolSpec, Trajectory, Usage


@dataclass(frozen=True, kw_only=True, slots=True)
class TextRequest:
    """Request of a session without tokens. `seed` is the seed of the rollout."""

    role: str
    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...]
    seed: int
    constraint: Constraint | None


LONGEST_TOKEN = 128
"""Number of bytes of the longest token of common vocabularies."""


class TextRecorder:
    """Factory of sessions whose replies are text that no engine of the run sampled, such as an expert's. Their
    trajectories have messages and no tokens. Implements `rollout.episode.SessionRecorder`.

    Args:
        source: source of the replies' segments.
        imitator: policy that will imitate the replies, within its context; None: tokens are not counted.
    """

    def __init__(
        self, reply: Callable[[TextRequest], Awaitable[Message]], source: Source, imitator: Imitator | None = None
    ) -> None:
        self.reply = reply
        self.source = source
        self.imitator = imitator

    def open(self, task: Task, *, rollout_id: str, seed: int, role: str, admission: int = 0) -> TextSession:
        return TextSession(self, task, rollout_id, seed, role)


class TextSession(OpenSession):
    """Session whose replies are text. Implements `protocols.Session`.

    Each reply arrives whole; `stop` and `max_tokens` do not apply. The ids of a reply are encoded by the imitator's
    tokenizer, without log-probabilities.
    """

    def __init__(self, recorder: TextRecorder, task: Task, rollout_id: str, seed: int, role: str) -> None:
        super().__init__(trajectory_id(rollout_id, role))
        self._recorder, self._task, self._seed, self._role = recorder, task, seed, role
        self._imitator = recorder.imitator
        self._ids = None if recorder.imitator is None else ImitatedIds(self.id, recorder.imitator)
        self._tree = TextTree(recorder.source)
        self._usage = Usage()

    @property
    def segments(self) -> Sequence[Segment]:
        return self._tree.segments

    @property
    def max_context(self) -> int:
        """Maximum number of ids of a prompt and its reply: the imitator's, or a common value without an imitator."""
        return 131072 if self._imitator is None else self._imitator.max_context

    @property
    def max_reply(self) -> int:
        """Maximum number of ids of one reply, as in `max_context`."""
        return 16384 if self._imitator is None else self._imitator.max_reply

    @property
    def max_prompt_bytes(self) -> int:
        return self.max_context * (LONGEST_TOKEN if self._imitator is None else self._imitator.renderer.longest_token)

    async def _sample(self, request: ReplyRequest) -> ReplyStream:
        """Request a reply and record it. Raises LimitReached if the task's limit was hit, or the prompt is too long for
        the server or for the imitator, which also needs room for the reply."""
        reply = await self._turn(request)
        if request.in_pieces:
            yield ReplyHead(id=reply.id, prompt_tokens=reply.prompt_tokens)
            for piece in ShownReply().rest(reply.message):
                yield piece
        yield reply

    async def abort(self, reply: str) -> None:
        """Do nothing: a reply comes at once."""

    def _delivered(self, reply: str, delivered: bool | None) -> None:
        place = place_named(reply)
        if place is not None and place < len(self._tree.segments) and reply == f"{self.id}#{place}":
            self._tree.deliver(place, delivered)

    def conversation(self, reply: str) -> tuple[Message, ...] | None:
        place = place_named(reply)
        if place is None or place >= len(self._tree.segments) or reply != f"{self.id}#{place}":
            return None
        return conversation(self._tree.segments, place)

    def count(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> int:
        """Return the number of the imitator's ids for a conversation that is rendered whole; 0 without an imitator."""
        return 0 if self._imitator is None else len(self._imitator.renderer.render(messages, tools).tokens)

    def bytes_of(self, token: int) -> bytes:
        return b"" if self._imitator is None else self._imitator.renderer.bytes_of(token)

    def transcripts(self) -> tuple[Transcript, ...]:
        return self._tree.transcripts()

    def trajectory(self, outcome: Outcome, timing: Timing = Timing()) -> Trajectory:
        return Trajectory(
            id=self.id,
            task=self._task.id,
            role=self._role,
            segments=tuple(self._tree.segments),
            outcome=outcome,
            usage=self._usage,
            timing=timing,
        )

    async def close(self) -> None:
        """Do nothing: the session holds no resources."""

    async def _turn(self, wanted: ReplyRequest) -> SampledReply:
        """Request a reply and record it. A prompt that is too long, or leaves no room for the reply, is not counted as
        a turn."""
        limits = self._task.limits
        if self._usage.turns >= limits.max_turns:
            raise LimitReached("max_turns", f"{self.id}: {limits.max_turns} turns are used up")
        messages, tools = tuple(wanted.messages), tuple(wanted.tools)
        turn = self._tree.plan(messages, tools)
        prompt = CountedPrompt() if self._ids is None else self._ids.prompt(turn)
        request = self._tree.ask(turn)
        self._usage = replace(self._usage, turns=self._usage.turns + 1)
        try:
            text_request = TextRequest(
                role=self._role,
                messages=messages,
                tools=tuple(wanted.callable),
                seed=self._seed,
                constraint=wanted.constraint,
            )
            reply = await self._recorder.reply(text_request)
            reply = self._tree.with_unique_call_ids(reply)
            tokens = () if self._ids is None else self._ids.reply(turn, prompt, reply)
        except BaseException as error:  # without an answer it was not a turn
            self._usage = replace(self._usage, turns=self._usage.turns - 1)
            if isinstance(error, PromptTooLong):
                raise LimitReached("context_length", str(error), error.too_long or self._at_least(prompt)) from error
            raise
        segment = self._tree.answer(request, reply, wanted.evidence, wanted.constraint)
        if self._ids is not None:
            self._ids.add(segment.index, prompt, tokens)
        self._usage = replace(self._usage, tool_calls=self._usage.tool_calls + len(reply.tool_calls))
        if self._usage.tool_calls > limits.max_tool_calls:
            raise LimitReached("max_tool_calls", f"{self.id}: more than {limits.max_tool_calls} tool calls")
        return SampledReply(
            id=f"{self.id}#{segment.index}",
            message=reply,
            finish_reason="stop",
            prompt_tokens=prompt.length,
            cached_tokens=0,
            tokens=tokens,
            logprobs=(),
            reasoning_tokens=self._thought_length(reply, tokens),
        )

    def _at_least(self, prompt: CountedPrompt) -> tuple[int, int]:
        """Return the length to report for a prompt that was too long for the server, and a room that is smaller than
        the prompt, if the server reported neither."""
        length = prompt.length or self.max_context + 1
        return length, min(self.max_context, length - 1)

    def _thought_length(self, reply: Message, tokens: tuple[int, ...]) -> int | None:
        """Return the number of reasoning ids of a reply; None if the number is unknown."""
        if self._imitator is None or not tokens:
            return None
        return self._imitator.renderer.thought_length(tokens) if reply.reasoning else 0
