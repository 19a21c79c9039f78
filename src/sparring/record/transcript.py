"""Conversations in messages, beside the record in tokens, and sessions that have nothing but messages."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass

from sparring.errors import LimitReached
from sparring.generation import Constraint
from sparring.record.replies import RecordedReplies
from sparring.reply import NO_EVIDENCE, Evidence, ReplyHead, SampledReply, Show, ShownReply, in_pieces
from sparring.types import Message, Outcome, ReplyPiece, Segment, Source, Task, Timing, ToolSpec, Trajectory, Usage


@dataclass(frozen=True, kw_only=True, slots=True)
class Transcript:
    """The conversation of one role as it was last asked, its reply included. `tools` are those of its last request,
    `constraints` what its replies were held to."""

    messages: tuple[Message, ...] = ()
    tools: tuple[ToolSpec, ...] = ()
    constraints: tuple[Constraint, ...] = ()


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
        self._messages: tuple[Message, ...] = ()
        self._replies: dict[str, tuple[Message, ...]] = {}
        self._tools: tuple[ToolSpec, ...] = ()
        self._constraints: list[Constraint] = []
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
        try:
            self.limit = None
            return await self._answered(tuple(messages), tuple(tools), constraint)
        except LimitReached as limit:
            self.limit = limit
            raise

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
        message = await self.complete(messages, tools, constraint=constraint)
        id = f"{self._id}#{len(messages)}"
        self._replies[id] = (*messages, message)
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
        return in_pieces(lambda show: self.reply(messages, tools, constraint=constraint, show=show), self.abort)

    async def abort(self, reply: str) -> None:
        """Do nothing: a reply comes at once."""

    def deliver(self, reply: str, delivered: bool) -> None:
        """Do nothing: text is not trained."""

    def conversation(self, reply: str) -> tuple[Message, ...] | None:
        """Return all messages up to a reply, itself included; None where there is no such reply. Of replies to
        conversations of one length it is the latest: they have one id."""
        return self._replies.get(reply)

    def count(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> int:
        """Return 0: there are no ids."""
        return 0

    def decode(self, token: int) -> str:
        """Return nothing: there are no ids."""
        return ""

    def transcript(self) -> Transcript:
        """Return the conversation so far."""
        return Transcript(messages=self._messages, tools=self._tools, constraints=tuple(self._constraints))

    def trajectory(self, outcome: Outcome, timing: Timing = Timing()) -> Trajectory:
        """Return the conversation as segments without tokens."""
        segments = tuple(
            Segment(
                index=place,
                parent=place - 1 if place else None,
                source=self._source_of(message),
                tokens=(),
                message=message,
            )
            for place, message in enumerate(self._messages)
        )
        return Trajectory(
            id=self._id,
            task=self._task.id,
            role=self._role,
            segments=segments,
            outcome=outcome,
            usage=self._usage,
            timing=timing,
        )

    async def close(self) -> None:
        """Do nothing: nothing is held."""

    async def _answered(
        self, messages: tuple[Message, ...], tools: tuple[ToolSpec, ...], constraint: Constraint | None
    ) -> Message:
        limits, used = self._task.limits, self._usage
        if used.turns >= limits.max_turns:
            raise LimitReached("max_turns", f"{self._id}: {limits.max_turns} turns are used up")
        self._messages, self._tools = messages, tools
        self._constraints += [] if constraint is None else [constraint]
        self._usage = Usage(turns=used.turns + 1, tool_calls=used.tool_calls)
        reply = await self._recorder.reply(
            TextRequest(role=self._role, messages=messages, tools=tools, seed=self._seed, constraint=constraint)
        )
        self._messages = (*messages, reply)
        self._usage = Usage(turns=used.turns + 1, tool_calls=used.tool_calls + len(reply.tool_calls))
        if self._usage.tool_calls > limits.max_tool_calls:
            raise LimitReached("max_tool_calls", f"{self._id}: more than {limits.max_tool_calls} tool calls")
        return reply

    def _source_of(self, message: Message) -> Source:
        if message.role == "assistant":
            return self._recorder.source
        return "tool" if message.role == "tool" else "prompt"
