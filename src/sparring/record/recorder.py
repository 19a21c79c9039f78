"""Recorded sessions: every token that a policy samples passes here and is written down as it was sampled."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Sequence
from functools import partial

from sparring.errors import EngineError, LimitReached, RequestEnded, SparringError, boundary, refusal
from sparring.generation import Completion, Constraint, GenerateRequest, Sampling
from sparring.protocols import Engine, Renderer, Store
from sparring.record.account import AccountedSession
from sparring.record.branches import Transcript
from sparring.record.budget import Budget
from sparring.record.lines import Turn
from sparring.record.order import conversation_of, last_words
from sparring.record.rendering import Binder, Planner
from sparring.record.replies import RecordedPlaces, RecordedReplies, RecordedReply
from sparring.record.request import (
    Rank,
    ReplyRequest,
    at_most,
    check_far,
    check_length,
    cut_reason,
    derived_seed,
    far_check,
    request_id,
    sampling_of,
)
from sparring.record.streaming import ShowingReader, named, without_stop
from sparring.record.tool_lists import ToolLists
from sparring.record.tree import Tree
from sparring.record.turns import TurnQueue
from sparring.reply import NO_EVIDENCE, Evidence, ReplyHead, SampledReply, Show, in_pieces
from sparring.types import (
    Limits,
    Message,
    Outcome,
    ReplyPiece,
    Segment,
    Task,
    Timing,
    ToolSpec,
    Trajectory,
    Usage,
)


class Recorder:
    """Opens sessions on one engine. Holds nothing of them but the turns that are about to be written.

    Args:
        engine: samples.
        renderer: messages <-> ids, of the model that the engine serves.
        store: every turn is durable there before its reply is returned; None keeps the record in memory only.
        sampling: how tokens are drawn; `seed` and `stop` are set per session, `max_tokens` and `min_tokens` are no more
            than what is left to it.
        model: the name under which sampled segments are recorded.
        max_context: most ids a prompt and its reply may have together.
    """

    def __init__(
        self,
        engine: Engine,
        renderer: Renderer,
        store: Store | None = None,
        *,
        sampling: Sampling = Sampling(),
        model: str = "policy",
        max_context: int = 32768,
    ) -> None:
        if max_context < 2:
            raise refusal("max_context", "at least 2 tokens", str(max_context), "raise it")
        self.engine = engine
        self.renderer = renderer
        self.binder = Binder(renderer)
        self.turns = None if store is None else TurnQueue(store)
        self.tool_lists = ToolLists()
        self.sampling = sampling
        self.model = model
        self.max_context = max_context

    def open(
        self,
        task: Task,
        *,
        rollout_id: str,
        seed: int,
        role: str = "policy",
        priority: int = 0,
        admission: int = 0,
        limits: Limits | None = None,
        replies: RecordedReplies | None = None,
    ) -> RecordedSession:
        """Open a session for one role of one rollout.

        Args:
            task: whose limits hold unless `limits` is given.
            rollout_id: the rollout's id; other roles than `policy` are recorded under `<rollout_id>/<role>`.
            seed: decides, with a token's position, every random number of the session.
            role: who speaks.
            priority: of its requests at the engine.
            admission: of its rollout, by which the engine ranks requests of one priority.
            limits: replaces the task's.
            replies: of the record of this rollout, where it is rebuilt: they answer the requests that they answered
                before, and are not written into the store again.
        """
        rank = Rank(priority, admission)
        session = RecordedSession(
            self, task, rollout_id=rollout_id, seed=seed, role=role, rank=rank, limits=limits or task.limits
        )
        session.replies = replies
        return session


class RecordedSession(AccountedSession):
    """One role's conversation: the `Session` that harness and gateway talk to, and the only writer of segments.

    Attributes:
        id: the trajectory's id.
        max_context: most ids that a prompt and its reply may have together.
        max_prompt_bytes: most bytes of text that so many ids may have.
        max_reply: most ids of one reply.
        usage: counts so far.
        generate_s: seconds that replies were waited for, summed over requests.
        account: of its requests.
        replies: of the record that answers before the engine does; None where nothing is rebuilt.
    """

    def __init__(
        self, recorder: Recorder, task: Task, *, rollout_id: str, seed: int, role: str, rank: Rank, limits: Limits
    ) -> None:
        super().__init__()
        self.id = trajectory_id(rollout_id, role)
        self.max_context = recorder.max_context
        self.max_prompt_bytes = recorder.max_context * recorder.renderer.longest_token
        self.max_reply = min(recorder.sampling.max_tokens, recorder.max_context)
        self.usage = Usage()
        self.generate_s = 0.0
        self.replies: RecordedReplies | None = None
        self._recorder = recorder
        self._task = task
        self._role = role
        self._rank = rank
        self._limits = limits
        self._seed = seed if role == "policy" else derived_seed(seed, role)
        self._tree = Tree(recorder.renderer, recorder.tool_lists)
        self._planner = Planner()
        self._budget = Budget(self.id, limits)
        self._places: RecordedPlaces | None = None
        self._closed = False
        self._sampled: dict[str, str] = {}  # requests at the engine, by the ids of their replies
        self._ended: set[str] = set()
        self._lanes: set[int] = set()

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The record so far."""
        return self._tree.segments

    async def complete(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec] = (), *, constraint: Constraint | None = None
    ) -> Message:
        """Ask for the next reply to a conversation, as a harness does that ends with the first reply cut short. The
        arguments and the other errors are those of `reply`.

        Raises:
            LimitReached: a limit of the task or the context was hit; a reply that was cut short is in the record.
        """
        reply = await self.reply(messages, tools, constraint=constraint)
        if reply.limit is not None:
            raise reply.limit
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
        calls: bool = True,
        show: Show | None = None,
    ) -> SampledReply:
        """Ask for the next reply to a conversation; one that was cut short is returned too.

        The history is matched against what this session said before. Where it continues that, the prompt is those very
        ids with the new messages appended; otherwise a new branch begins with a whole render.

        Args:
            messages: the whole conversation; where it ends with a reply, another one follows that.
            tools: that the prompt shows; without any, the reply is text.
            constraint: what the reply's text must be, in the place of the run's; then no `min_tokens` holds, because it
                is the constraint that says how short a reply may be.
            max_tokens: no more are sampled for this reply; a reply that this cuts has hit no limit of the rollout.
            stop: strings that end this reply, beside those of the run.
            evidence: what the client says of the request beside the conversation.
            calls: whether a call in the reply is one; where not, it is text, whatever tools the prompt shows.
            show: takes the reply while it is sampled.

        Cancelled, it drops the request: nothing of the turn is in the record, and asked again, it is the same turn,
        which samples the same tokens. A request that the engine ends with what it has, after `abort` or of itself, is
        in the record as lost; asked again, it is another turn.

        Raises:
            BadInput: the constraint does not compile, or a stop string is empty; nothing was sampled.
            LimitReached: a limit of the task or the context leaves no token to sample.
            EngineError: the engine failed, or gave up; `RequestEnded` where `abort` ended the reply.
            StoreError: the turn could not be made durable.
        """
        with self.account.request(evidence) as end:
            reply = await self._answered(
                ReplyRequest(messages, tools, constraint, max_tokens, stop, evidence, calls, show)
            )
            end(reply.limit)
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
        """Ask for the next reply to a conversation, in pieces; see `AnsweringSession.stream`. The arguments and errors
        are those of `reply`."""
        ask = partial(
            self.reply,
            messages,
            tools,
            constraint=constraint,
            max_tokens=max_tokens,
            stop=stop,
            evidence=evidence,
            calls=calls,
        )
        return in_pieces(lambda show: ask(show=show), self.abort)

    async def abort(self, reply: str) -> None:
        """End a reply that is being sampled, by its id; see `AnsweringSession.abort`."""
        request = self._sampled.get(reply)
        if request is not None:
            self._ended.add(request)
            await self._recorder.engine.abort(request)

    async def _answered(self, request: ReplyRequest) -> SampledReply:
        """Take turns until one is answered: the record may have some that the engine gave up."""
        while True:
            reply = await self._turn(request)
            if reply is not None:
                return reply

    async def _turn(self, request: ReplyRequest) -> SampledReply | None:
        """Plan a turn, sample its reply and write it down.

        Returns:
            The reply; None where it comes from the record, in which the engine gave it up.
        """
        self._budget.check(self.usage)
        turn = await self._planned(request)
        granted, recorded, shown = 0, None, self._showing(turn, request)
        try:
            sampling = self._sampling(turn, request)
            if self.replies is not None:
                recorded = await self.replies.take(self._role, turn.prompt, sampling)
            if recorded is None:
                granted = await self._budget.grant(sampling.max_tokens)
                sampling = at_most(sampling, granted)
                completion = await self._generate(turn, sampling, shown)
            else:
                sampling, completion = recorded.sampling, recorded.completion()
            message, stop = self._message(turn, request, completion, recorded, shown)
            new = self._write(turn, completion, message, sampling, recorded)
        except BaseException:  # asked again, this turn is the same turn and samples the same tokens
            self._tree.abandon(turn)
            raise
        finally:
            if granted:
                self._budget.give_back(granted, self.usage)
        tool_calls = self.usage.tool_calls
        if self._recorder.turns is not None and recorded is None:  # a task cancelled here leaves a whole record
            entries = () if self.replies is None else self.replies.take_entries()
            await self._recorder.turns.put(self.id, new, entries)
        if completion.finish_reason == "abort":
            if recorded is not None:
                return None
            raise self._gave_up(request_id(self.id, turn), len(completion.tokens))
        if shown is not None:
            shown.end(message)
        return SampledReply(
            id=f"{self.id}#{turn.place}",
            message=message,
            finish_reason=completion.finish_reason,
            prompt_tokens=turn.length,
            cached_tokens=completion.cached_tokens,
            tokens=completion.tokens,
            logprobs=completion.logprobs,
            reasoning_tokens=self._recorder.renderer.thought_length(completion.tokens) if message.reasoning else 0,
            limit=self._limit_hit(
                completion,
                cut_reason(self._recorder.sampling.max_tokens, self._room(turn), request, sampling.max_tokens),
                tool_calls,
            ),
            stop=stop,
        )

    def _showing(self, turn: Turn, request: ReplyRequest) -> ShowingReader | None:
        """Return what shows the reply of a turn; None where nobody wants to see it."""
        if request.show is None:
            return None
        return ShowingReader(
            self._recorder.renderer.reader(request.callable, prompt=turn.added),
            ReplyHead(id=f"{self.id}#{turn.place}", prompt_tokens=turn.length),
            request.show,
            stop=request.stop,
            calls=self._tree.call_ids(turn),
        )

    async def _planned(self, request: ReplyRequest) -> Turn:
        """Return the turn that a request is; one of a record that comes again has its place there. Raises LimitReached
        where its messages are too long by far."""
        if self.replies is not None and self._places is None:
            self._places = self.replies.places(self._role)
            self._tree.reserve(self._places.inputs, self._places.all)
        places = self._places

        def recorded(prompt: bytes, repeat: int) -> int | None:
            return None if places is None else places.of(prompt, self._seed_of(repeat))

        steps = self._tree.planning(request.messages, request.tools, request.evidence, recorded)
        check = far_check(self.id, request.messages, self._recorder.renderer, self.max_context)
        turn = await self._planner.plan(steps, check)
        if turn.node is not None and self._tree.is_lost(turn.node.place):
            self.deliver(f"{self.id}#{turn.node.place}", True)  # its client goes on from it, so it got it
        return turn

    def _limit_hit(self, completion: Completion, cut_reason: str, tool_calls: int) -> LimitReached | None:
        """Return the limit that a reply hit. `cut_reason`: of one that was cut short, empty where its client cut it."""
        if completion.finish_reason == "length" and cut_reason:
            text = f"{self.id}: a reply was cut short after {len(completion.tokens)} tokens"
            return LimitReached(cut_reason, text)
        return self._budget.too_many_calls() if tool_calls > self._limits.max_tool_calls else None

    def deliver(self, reply: str, delivered: bool) -> None:
        """Take note of whether a client got a reply whole; see `AnsweringSession.deliver`. A lost one is recorded."""
        segment = self._tree.deliver(reply, delivered)
        if segment is not None and self._recorder.turns is not None and not self._closed:
            self._recorder.turns.note(self.id, segment)

    def conversation(self, reply: str) -> tuple[Message, ...] | None:
        """Return all messages up to a reply, itself included; None where there is no such reply."""
        return conversation_of(self.segments, self.id, reply)

    @property
    def last_words(self) -> Message | None:
        """The main agent's last reply that called nothing; None where there is none."""
        return last_words(self.segments)

    def count(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> int:
        """Return the number of ids of a conversation that is rendered whole. Raises LimitReached where that is too long
        by far."""
        check_far(self.id, messages, self._recorder.renderer, self.max_context)
        return len(self._recorder.renderer.render(messages, tools).tokens)

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of one id, which may be a part of a character."""
        return self._recorder.renderer.bytes_of(token)

    def trajectory(self, outcome: Outcome, timing: Timing = Timing()) -> Trajectory:
        """Return the record as a trajectory. `timing.generate_s` becomes the seconds that the session measured."""
        return Trajectory(
            id=self.id,
            task=self._task.id,
            role=self._role,
            segments=self.segments,
            outcome=outcome,
            usage=self.usage,
            timing=dataclasses.replace(timing, generate_s=self.generate_s),
        )

    def transcripts(self) -> tuple[Transcript, ...]:
        """Return the conversation of each of its branches, in messages."""
        return self._tree.transcripts()

    async def close(self) -> None:
        """Let the engine forget this session's KV. The record stays."""
        self._closed = True
        lanes, self._lanes = sorted(self._lanes), set()
        for lane in lanes:
            await self._recorder.engine.release(self._conversation(lane))

    def _sampling(self, turn: Turn, request: ReplyRequest) -> Sampling:
        """Return how this turn is drawn, with all the tokens that it may have in this context.

        Raises:
            LimitReached: the context leaves none.
        """
        room = self._room(turn)
        check_length(self.id, turn.length, self._recorder.max_context)
        recorder, seed = self._recorder, self._seed_of(turn.repeat)
        sampling = sampling_of(request, recorder.sampling, stop_ids=recorder.renderer.stop_ids, seed=seed)
        return at_most(sampling, min(sampling.max_tokens, room))

    def _seed_of(self, repeat: int) -> int:
        return self._seed if repeat == 0 else derived_seed(self._seed, "repeat", repeat)

    async def _generate(self, turn: Turn, sampling: Sampling, shown: ShowingReader | None) -> Completion:
        request = GenerateRequest(
            id=request_id(self.id, turn),
            tokens=self._tree.prompt(turn),
            sampling=sampling,
            conversation=self._conversation(turn.lane),
            priority=self._rank.priority,
            admission=self._rank.admission,
        )
        self._lanes.add(turn.lane)
        clock = asyncio.get_running_loop().time
        started, reply = clock(), f"{self.id}#{turn.place}"
        self._sampled[reply] = request.id
        try:
            with boundary(EngineError, f"engine of {self._recorder.model}"):
                engine, bound = self._recorder.engine, await self._recorder.binder.bind(request)
                if request.id in self._ended:  # meanwhile, and the engine did not know of it
                    raise self._gave_up(request.id, 0)
                completion = await (engine.generate(bound) if shown is None else shown.sampled(engine, bound))
        finally:
            del self._sampled[reply]
            self.generate_s += clock() - started
        if not completion.tokens:
            raise self._gave_up(request.id, 0)
        return completion

    def _gave_up(self, request: str, tokens: int) -> SparringError:
        """Return the error of a request that the engine ended before its reply was whole."""
        if request in self._ended:
            self._ended.discard(request)
            return RequestEnded(f"{request}: ended after {tokens} tokens")
        return EngineError(f"{request}: the engine gave up after {tokens} tokens")

    def _write(
        self,
        turn: Turn,
        completion: Completion,
        reply: Message,
        sampling: Sampling,
        recorded: RecordedReply | None,
    ) -> list[Segment]:
        """Write a turn into the record and the counts, and return the new segments."""
        before = None if recorded is None else recorded.segment
        new = self._tree.append(turn, completion, reply, sampling, self._recorder.model, before)
        self.usage = Usage(
            sampled_tokens=self.usage.sampled_tokens + len(completion.tokens),
            prompt_tokens=self.usage.prompt_tokens + turn.length,
            cached_tokens=self.usage.cached_tokens + completion.cached_tokens,
            turns=self.usage.turns + 1,
            tool_calls=self.usage.tool_calls + len(reply.tool_calls),
        )
        return new

    def _message(
        self,
        turn: Turn,
        request: ReplyRequest,
        completion: Completion,
        recorded: RecordedReply | None,
        shown: ShowingReader | None,
    ) -> tuple[Message, str | None]:
        """Return the reply with ids of calls that are unique in the session, and the client's string that ended it, if
        one did. Ids of the format itself stay."""
        parsed = self._recorder.renderer.parse(completion.tokens, request.callable, prompt=turn.added)
        message, stop = without_stop(parsed, request.stop)
        if recorded is not None and recorded.segment.message is not None:
            return recorded.segment.message, stop
        calls = self._tree.call_ids(turn) if shown is None else shown.calls
        return named(message, calls), stop

    def _room(self, turn: Turn) -> int:
        """Return how many tokens the context has for the reply of a turn."""
        return self._recorder.max_context - turn.length

    def _conversation(self, lane: int) -> str:
        return f"{self.id}#{lane}"


def trajectory_id(rollout_id: str, role: str) -> str:
    """Return the id of a role's trajectory: the policy's is its rollout's."""
    return rollout_id if role == "policy" else f"{rollout_id}/{role}"
