"""Sessions that have nothing but messages: replies are text, of an expert or of a server of chat completions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from sparring.errors import LimitReached, PromptTooLong
from sparring.generation import Constraint
from sparring.record.account import AccountedSession
from sparring.record.branches import Transcript
from sparring.record.imitated import CountedPrompt, ImitatedIds, Imitator
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


LONGEST_TOKEN = 128
"""Bytes of the longest token of common vocabularies."""


class TextRecorder:
    """Opens sessions whose replies are text that none of our engines sampled, such as an expert's: their trajectories
    have messages and no tokens. Implements `rollout.episode.SessionRecorder`.

    Args:
        reply: answers a request.
        source: of the segments that hold replies.
        imitator: the policy that is to imitate them: no prompt is longer than its context. None: ids are not counted.
    """

    def __init__(
        self, reply: Callable[[TextRequest], Awaitable[Message]], source: Source, imitator: Imitator | None = None
    ) -> None:
        self.reply = reply
        self.source = source
        self.imitator = imitator

    def open(
        self, task: Task, *, rollout_id: str, seed: int, role: str, priority: int, admission: int = 0
    ) -> TextSession:
        """Open the session of one role of one rollout."""
        return TextSession(self, task, rollout_id, seed, role)


class TextSession(AccountedSession):
    """One role's conversation in messages. Implements `rollout.episode.OpenSession`.

    Attributes:
        account: of its requests.
        replies: of a record; text has no tokens, so none is given again.
    """

    def __init__(self, recorder: TextRecorder, task: Task, rollout_id: str, seed: int, role: str) -> None:
        super().__init__()
        self.replies: RecordedReplies | None = None
        self._recorder, self._task, self._seed, self._role = recorder, task, seed, role
        self._id = rollout_id if role == "policy" else f"{rollout_id}/{role}"
        self._imitator = recorder.imitator
        self._ids = None if recorder.imitator is None else ImitatedIds(self._id, recorder.imitator)
        self._tree = TextTree(recorder.source)
        self._usage = Usage()

    @property
    def segments(self) -> Sequence[Segment]:
        """The record so far."""
        return self._tree.segments

    @property
    def max_context(self) -> int:
        """Most ids of a prompt and its reply: those of the imitator; without one, what clients take for a common
        model."""
        return 131072 if self._imitator is None else self._imitator.max_context

    @property
    def max_reply(self) -> int:
        """Most ids of one reply, as in `max_context`."""
        return 16384 if self._imitator is None else self._imitator.max_reply

    @property
    def max_prompt_bytes(self) -> int:
        """Most bytes of text that so many ids may have."""
        return self.max_context * (LONGEST_TOKEN if self._imitator is None else self._imitator.renderer.longest_token)

    async def complete(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec] = (), *, constraint: Constraint | None = None
    ) -> Message:
        """Ask for the next reply to a conversation. Raises as `reply` does."""
        return (await self.reply(messages, tools, constraint=constraint)).message

    async def reply(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec] = (),
        *,
        constraint: Constraint | None = None,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        evidence: Evidence = NO_EVIDENCE,
        calls: bool = True,
        show: Show | None = None,
    ) -> SampledReply:
        """Ask for the next reply to a conversation, which comes whole: no string stops it, and it is as long as it is.
        Its ids are those that its imitator has, and have no log-probabilities.

        Raises:
            LimitReached: a limit of the task was hit, or the prompt is too long for who answers, or for the imitator,
                who has to have room for the reply as well.
            EngineError: nobody answered.
        """
        with self.account.request(evidence) as end:
            reply = await self._turn(tuple(messages), tuple(tools), constraint, evidence, calls)
            end(None)
        if show is not None:
            for part in (ReplyHead(id=reply.id, prompt_tokens=reply.prompt_tokens), *ShownReply().rest(reply.message)):
                show(part)
        return reply

    def stream(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec] = (),
        *,
        constraint: Constraint | None = None,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        evidence: Evidence = NO_EVIDENCE,
        calls: bool = True,
    ) -> AsyncIterator[ReplyHead | ReplyPiece | SampledReply]:
        """Ask for the next reply to a conversation, which comes at once. Raises as `reply` does."""
        ask = partial(self.reply, messages, tools, constraint=constraint, evidence=evidence, calls=calls)
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
        """Return the number of ids that the imitator has of a conversation that is rendered whole; 0 without one."""
        return 0 if self._imitator is None else len(self._imitator.renderer.render(messages, tools).tokens)

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of one id of the imitator's; nothing without one."""
        return b"" if self._imitator is None else self._imitator.renderer.bytes_of(token)

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

    async def _turn(
        self,
        messages: tuple[Message, ...],
        tools: tuple[ToolSpec, ...],
        constraint: Constraint | None,
        evidence: Evidence,
        calls: bool,
    ) -> SampledReply:
        """Ask for a reply and write it down. A prompt that is too long, or leaves no room for the reply, is no turn."""
        limits = self._task.limits
        if self._usage.turns >= limits.max_turns:
            raise LimitReached("max_turns", f"{self._id}: {limits.max_turns} turns are used up")
        turn = self._tree.plan(messages, tools)
        prompt = CountedPrompt() if self._ids is None else self._ids.prompt(turn)
        request = self._tree.ask(turn)
        self._usage = replace(self._usage, turns=self._usage.turns + 1)
        try:
            shown = tools if calls else ()
            wanted = TextRequest(
                role=self._role, messages=messages, tools=shown, seed=self._seed, constraint=constraint
            )
            reply = await self._recorder.reply(wanted)
            reply = self._tree.told_apart(reply)
            tokens = () if self._ids is None else self._ids.reply(turn, prompt, reply)
        except BaseException as error:  # nobody answered: it was no turn
            self._usage = replace(self._usage, turns=self._usage.turns - 1)
            if isinstance(error, PromptTooLong):
                raise LimitReached("context_length", str(error), error.too_long or self._at_least(prompt)) from error
            raise
        segment = self._tree.answer(request, reply, evidence, constraint)
        if self._ids is not None:
            self._ids.add(segment.index, prompt, tokens)
        self._usage = replace(self._usage, tool_calls=self._usage.tool_calls + len(reply.tool_calls))
        if self._usage.tool_calls > limits.max_tool_calls:
            raise LimitReached("max_tool_calls", f"{self._id}: more than {limits.max_tool_calls} tool calls")
        return SampledReply(
            id=f"{self._id}#{segment.index}",
            message=reply,
            finish_reason="stop",
            prompt_tokens=prompt.length,
            cached_tokens=0,
            tokens=tokens,
            logprobs=(),
            reasoning_tokens=self._thought_length(reply, tokens),
        )

    def _at_least(self, prompt: CountedPrompt) -> tuple[int, int]:
        """Return the ids of a prompt that was too long for who was asked, and the room, where nobody said them: there
        is less room than the prompt has ids."""
        length = prompt.length or self.max_context + 1
        return length, min(self.max_context, length - 1)

    def _thought_length(self, reply: Message, tokens: tuple[int, ...]) -> int | None:
        """Return the number of a reply's ids that are its thought; None where nobody knows."""
        if self._imitator is None or not tokens:
            return None
        return self._imitator.renderer.thought_length(tokens) if reply.reasoning else 0
