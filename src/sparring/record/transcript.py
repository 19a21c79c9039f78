"""Sessions that have nothing but messages: replies are text, of an expert or of a server of chat completions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from sparring.errors import LimitReached
from sparring.generation import Constraint
from sparring.record.branches import Transcript
from sparring.record.lines import place_named
from sparring.record.order import conversation, last_words
from sparring.record.replies import RecordedReplies
from sparring.record.text_tree import TextTree
from sparring.reply import NO_EVIDENCE, Evidence, ReplyHead, SampledReply, Show, ShownReply, in_pieces
from sparring.types import Message, Outcome, ReplyPiece, Segment, Source, Task, Timing, ToolSpec, Trajectory, Usage


@dataclass(frozen=True, kw_only=True, slots=True)
class TextRequest:
    """A request of a session without tokens. `seed` is the rollout's."""

    role: str
    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...]
    seed: int
    constraint: Constraint | None


class TextRecorder:
    """Opens sessions whose replies are text that none of our engines sampled, such as an expert's: their trajectories
    have messages and no tokens. Implements `rollout.episode.SessionRecorder`.

    Args:
        reply: answers a request.
        source: of the segments that hold replies.
    """

    def __init__(self, reply: Callable[[TextRequest], Awaitable[Message]], source: Source) -> None:
        self.reply = reply
        self.source = source

    def open(
        self, task: Task, *, rollout_id: str, seed: int, role: str, priority: int, admission: int = 0
    ) -> TextSession:
        """Open the session of one role of one rollout."""
        return TextSession(self, task, rollout_id, seed, role)


class TextSession:
    """One role's conversation in messages. Implements `rollout.episode.OpenSession`.

    Attributes:
        limit: the limit that its latest request hit, None where that was answered.
        replies: of a record; text has no tokens, so none is given again.
    """

    def __init__(self, recorder: TextRecorder, task: Task, rollout_id: str, seed: int, role: str) -> None:
        self.limit: LimitReached | None = None
        self.replies: RecordedReplies | None = None
        self._recorder, self._task, self._seed, self._role = recorder, task, seed, role
        self._id = rollout_id if role == "policy" else f"{rollout_id}/{role}"
        self._tree = TextTree(recorder.source)
        self._usage = Usage()

    @property
    def max_context(self) -> int:
        """Most ids of a prompt and its reply, of which text has none: what clients take for a common model."""
        return 131072

    @property
    def max_reply(self) -> int:
        """Most ids of one reply, of which text has none."""
        return 16384

    async def complete(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec] = (), *, constraint: Constraint | None = None
    ) -> Message:
        """Ask for the next reply to a conversation.

        Raises:
            LimitReached: a limit of the task was hit.
            EngineError: nobody answered.
        """
        reply = await self._answered(tuple(messages), tuple(tools), constraint, NO_EVIDENCE)
        assert reply.message is not None
        return reply.message

    async def reply(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec] = (),
        *,
        constraint: Constraint | None = None,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        evidence: Evidence = NO_EVIDENCE,
        show: Show | None = None,
    ) -> SampledReply:
        """Ask for the next reply to a conversation; it has no tokens, so none are too many and no string stops it.

        Raises:
            LimitReached: a limit of the task was hit.
            EngineError: nobody answered.
        """
        segment = await self._answered(tuple(messages), tuple(tools), constraint, evidence)
        id, message = f"{self._id}#{segment.index}", segment.message
        assert message is not None
        for part in (ReplyHead(id=id, prompt_tokens=0), *ShownReply().rest(message)) if show is not None else ():
            show(part)
        return SampledReply(
            id=id,
            message=message,
            finish_reason="stop",
            prompt_tokens=0,
            cached_tokens=0,
            tokens=(),
            logprobs=(),
            reasoning_tokens=None,
        )

    def stream(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec] = (),
        *,
        constraint: Constraint | None = None,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        evidence: Evidence = NO_EVIDENCE,
    ) -> AsyncIterator[ReplyHead | ReplyPiece | SampledReply]:
        """Ask for the next reply to a conversation, which comes at once. Raises as `reply` does."""
        ask = partial(self.reply, messages, tools, constraint=constraint, evidence=evidence)
        return in_pieces(lambda show: ask(show=show), self.abort)

    async def abort(self, reply: str) -> None:
        """Do nothing: a reply comes at once."""

    def deliver(self, reply: str, delivered: bool) -> None:
        """Take note of whether a client got a reply whole: a lost one is not imitated."""
        place = place_named(reply)
        if place is not None and place < len(self._tree.segments) and reply == f"{self._id}#{place}":
            self._tree.deliver(place, delivered)

    @property
    def last_words(self) -> Message | None:
        """The main agent's last reply that called nothing; None where there is none."""
        return last_words(self._tree.segments)

    def conversation(self, reply: str) -> tuple[Message, ...] | None:
        """Return all messages up to a reply, itself included; None where there is no such reply."""
        place = place_named(reply)
        if place is None or place >= len(self._tree.segments) or reply != f"{self._id}#{place}":
            return None
        return conversation(self._tree.segments, place)

    def count(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> int:
        """Return 0: there are no ids."""
        return 0

    def bytes_of(self, token: int) -> bytes:
        """Return nothing: there are no ids."""
        return b""

    def transcripts(self) -> tuple[Transcript, ...]:
        """Return the conversation of each of its branches."""
        return self._tree.transcripts()

    def trajectory(self, outcome: Outcome, timing: Timing = Timing()) -> Trajectory:
        """Return the record as segments without tokens."""
        return Trajectory(
            id=self._id,
            task=self._task.id,
            role=self._role,
            segments=tuple(self._tree.segments),
            outcome=outcome,
            usage=self._usage,
            timing=timing,
        )

    async def close(self) -> None:
        """Do nothing: nothing is held."""

    async def _answered(
        self,
        messages: tuple[Message, ...],
        tools: tuple[ToolSpec, ...],
        constraint: Constraint | None,
        evidence: Evidence,
    ) -> Segment:
        """Return the segment of the next reply."""
        try:
            self.limit = None
            return await self._turn(messages, tools, constraint, evidence)
        except LimitReached as limit:
            self.limit = limit
            raise

    async def _turn(
        self,
        messages: tuple[Message, ...],
        tools: tuple[ToolSpec, ...],
        constraint: Constraint | None,
        evidence: Evidence,
    ) -> Segment:
        limits, used = self._task.limits, self._usage
        if used.turns >= limits.max_turns:
            raise LimitReached("max_turns", f"{self._id}: {limits.max_turns} turns are used up")
        request = self._tree.ask(messages, tools)
        self._usage = replace(used, turns=used.turns + 1)
        reply = await self._recorder.reply(
            TextRequest(role=self._role, messages=messages, tools=tools, seed=self._seed, constraint=constraint)
        )
        segment = self._tree.answer(request, reply, evidence, constraint)
        self._usage = replace(self._usage, tool_calls=self._usage.tool_calls + len(reply.tool_calls))
        if self._usage.tool_calls > limits.max_tool_calls:
            raise LimitReached("max_tool_calls", f"{self._id}: more than {limits.max_tool_calls} tool calls")
        return segment
