"""Recorded sessions: sessions that sample from an engine and record every sampled token unchanged."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import cast

from sparring.errors import EngineError, LimitReached, RequestEnded, SparringError, boundary, refusal
from sparring.generation import Completion, Delta, GenerateRequest, Sampling
from sparring.protocols import Engine, Renderer, Store
from sparring.record.branches import Transcript
from sparring.record.budget import Budget
from sparring.record.journal import RecordedReply, RecordedTurns, SessionJournal
from sparring.record.lines import Turn
from sparring.record.rendering import Binder, in_thread
from sparring.record.request import (
    at_most,
    check_far,
    check_length,
    cut_reason,
    derived_seed,
    is_far,
    request_id,
    sampling_of,
)
from sparring.record.session import OpenSession, trajectory_id
from sparring.record.streaming import PieceReader, StopHolder, named, without_stop
from sparring.record.tool_lists import ToolLists
from sparring.record.tree import Tree
from sparring.record.turns import TurnQueue
from sparring.reply import ReplyHead, ReplyPart, ReplyRequest, ReplyStream, SampledReply
from sparring.types import (
    Limits,
    Message,
    Outcome,
    Segment,
    StopReason,
    Task,
    Timing,
    ToolSpec,
    Trajectory,
    Usage,
)


class Recorder:
    """Factory of sessions on one engine. A recorder holds only turns that are about to be written.

    Args:
        store: store in which every turn is durable before its reply is returned; None keeps the record in memory only.
        sampling: sampling settings. Each session sets `seed` and `stop`; `max_tokens` and `min_tokens` are reduced to
            the remaining budget.
        model: name of the model in the record.
        max_context: maximum number of ids of a prompt and its reply.
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
        admission: int = 0,
        limits: Limits | None = None,
        journal: SessionJournal | None = None,
    ) -> RecordedSession:
        """Open a session for one role of one rollout.

        Args:
            task: task of the rollout; its limits hold unless `limits` is given.
            rollout_id: id of the rollout; roles other than `policy` are recorded under `<rollout_id>/<role>`.
            seed: seed that decides, with a token's position, every random number of the session.
            admission: index of the rollout's group; the engine serves the lowest first.
            limits: limits that replace the task's.
            journal: journal of this rollout. Its recorded replies answer their requests and are not stored again; new
                turns are appended to it.
        """
        session = RecordedSession(
            self, task, rollout_id=rollout_id, seed=seed, role=role, admission=admission, limits=limits or task.limits
        )
        session.journal = journal
        return session


class RecordedSession(OpenSession):
    """Session that samples from an engine and records every token unchanged. Implements `protocols.Session`.

    The messages of a request are matched against the record. If they continue a recorded conversation, the prompt is
    the recorded ids with the new messages appended; otherwise a new branch begins, which is rendered whole.

    Attributes:
        generate_s: seconds spent waiting for replies, summed over requests.
    """

    def __init__(
        self, recorder: Recorder, task: Task, *, rollout_id: str, seed: int, role: str, admission: int, limits: Limits
    ) -> None:
        super().__init__(trajectory_id(rollout_id, role))
        self.usage = Usage()
        self.generate_s = 0.0
        self._recorder = recorder
        self._task = task
        self._role = role
        self._admission = admission
        self._limits = limits
        self._seed = seed if role == "policy" else derived_seed(seed, role)
        self._tree = Tree(recorder.renderer, recorder.tool_lists)
        self._planning = asyncio.Lock()  # in order of arrival, so that the record does not depend on timing
        self._budget = Budget(self.id, limits)
        self._recorded_turns: RecordedTurns | None = None
        self._closed = False
        self._under_way: dict[str, str] = {}  # requests at the engine, by the ids of their replies
        self._ended: set[str] = set()
        self._lanes: set[int] = set()

    @property
    def max_context(self) -> int:
        return self._recorder.max_context

    @property
    def max_prompt_bytes(self) -> int:
        return self.max_context * self._recorder.renderer.longest_token

    @property
    def max_reply(self) -> int:
        return min(self._recorder.sampling.max_tokens, self.max_context)

    @property
    def segments(self) -> tuple[Segment, ...]:
        return self._tree.segments

    async def abort(self, reply: str) -> None:
        request = self._under_way.get(reply)
        if request is not None:
            self._ended.add(request)
            await self._recorder.engine.abort(request)

    async def _sample(self, request: ReplyRequest) -> ReplyStream:
        """Sample a reply in one turn. When a record is played again, the turns that the engine gave up come first. A
        request that the engine ends early, after `abort` or on its own, is recorded as lost; a repeated request is
        another turn."""
        answered = False
        while not answered:
            async with aclosing(self._turn(request)) as parts:
                async for part in parts:
                    answered = answered or isinstance(part, SampledReply)
                    yield part

    async def _turn(self, request: ReplyRequest) -> ReplyStream:
        """Plan a turn, sample its reply and record it. Yield nothing for a turn that was given up in the record."""
        self._check_open()
        self._budget.check(self.usage)
        turn = await self._planned(request)
        granted, recorded, reader, abandoned = 0, None, self._reader(turn, request), False
        try:
            sampling = self._sampling(turn, request)
            if self.journal is not None:
                recorded = await self.journal.reply(self._role, turn.prompt, sampling)
            if recorded is None:
                granted = await self._budget.grant(sampling.max_tokens)
                sampling = at_most(sampling, granted)
                async with aclosing(self._generate(turn, sampling, reader)) as parts:
                    async for part in parts:
                        if isinstance(part, Completion):
                            completion = part
                        elif not abandoned:
                            try:
                                yield part
                            except GeneratorExit:  # the reply is recorded all the same
                                abandoned = True
                                await self.abort(self._reply_id(turn))
                self._check_open()
            else:
                sampling, completion = recorded.sampling, recorded.completion()
            message, stop = self._message(turn, request, completion, recorded, reader)
            new = self._write(turn, completion, message, sampling, recorded)
        except BaseException as error:  # a repeated request is the same turn and samples the same tokens
            self._tree.abandon(turn)
            if abandoned and isinstance(error, SparringError):
                return
            raise
        finally:
            if granted:
                self._budget.give_back(granted, self.usage)
            if self._closed:  # the engine has kept the conversation of this request since the session was closed
                await self._recorder.engine.release(self._conversation(turn.lane))
        tool_calls = self.usage.tool_calls
        if recorded is None:
            await self._keep(new)
        if completion.finish_reason == "abort" and recorded is None:
            gave_up = self._gave_up(request_id(self.id, turn), len(completion.tokens))
            if not abandoned:
                raise gave_up
        if abandoned or completion.finish_reason == "abort":
            return
        if reader is not None:
            for part in reader.rest(message):
                yield part
        yield self._sampled_reply(turn, request, completion, sampling, message, stop, tool_calls)

    def _sampled_reply(
        self,
        turn: Turn,
        request: ReplyRequest,
        completion: Completion,
        sampling: Sampling,
        message: Message,
        stop: str | None,
        tool_calls: int,
    ) -> SampledReply:
        """Return the reply of a recorded turn. `tool_calls`: number of tool calls of the session, including this
        turn."""
        cut = cut_reason(self._recorder.sampling.max_tokens, self._room(turn), request, sampling.max_tokens)
        return SampledReply(
            id=self._reply_id(turn),
            message=message,
            finish_reason=completion.finish_reason,
            prompt_tokens=turn.length,
            cached_tokens=completion.cached_tokens,
            tokens=completion.tokens,
            logprobs=completion.logprobs,
            reasoning_tokens=self._recorder.renderer.thought_length(completion.tokens) if message.reasoning else 0,
            limit=self._limit_hit(completion, cut, tool_calls),
            stop=stop,
        )

    def _reply_id(self, turn: Turn) -> str:
        return f"{self.id}#{turn.place}"

    def _reader(self, turn: Turn, request: ReplyRequest) -> PieceReader | None:
        """Return the reader of a turn's reply; None if the request wants the whole reply at once."""
        if not request.in_pieces:
            return None
        return PieceReader(
            self._recorder.renderer.reader(request.callable, prompt=turn.added),
            ReplyHead(id=self._reply_id(turn), prompt_tokens=turn.length),
            holder=StopHolder(request.stop, self._recorder.renderer.decode),
            calls=self._tree.call_ids(turn),
        )

    async def _planned(self, request: ReplyRequest) -> Turn:
        """Plan the turn of a request. A recorded turn that is played again gets its recorded place. Raises LimitReached
        if the messages are far too long."""
        if self.journal is not None and self._recorded_turns is None:
            self._recorded_turns = self.journal.turns(self._role)
            self._tree.reserve(self._recorded_turns.inputs, self._recorded_turns.places)
        turns = self._recorded_turns

        def recorded(prompt: bytes, repeat: int) -> int | None:
            return None if turns is None else turns.place_of(prompt, self._seed_of(repeat))

        async with self._planning:
            if is_far(request.messages, self.max_context):
                await in_thread(self._check_far, request.messages)
            turn = await self._tree.plan(request.messages, request.tools, request.evidence, recorded)
        if turn.node is not None and self._tree.is_lost(turn.node.place):
            self._delivered(f"{self.id}#{turn.node.place}", True)  # its client continues from it, so it has received it
        return turn

    def _limit_hit(self, completion: Completion, cut_reason: StopReason | None, tool_calls: int) -> LimitReached | None:
        """Return the limit that a reply hit. `cut_reason`: reason of the truncation, None if the client's `max_tokens`
        caused it."""
        if completion.finish_reason == "length" and cut_reason is not None:
            text = f"{self.id}: a reply was cut short after {len(completion.tokens)} tokens"
            return LimitReached(cut_reason, text)
        return self._budget.too_many_calls() if tool_calls > self._limits.max_tool_calls else None

    def _delivered(self, reply: str, delivered: bool | None) -> None:
        segment = self._tree.deliver(reply, delivered)
        if segment is None or self._has_ended:
            return
        if self.journal is not None:
            self.journal.sampled(self._role, (segment,))
        if self._recorder.turns is not None:
            self._recorder.turns.note(self.id, segment)

    def count(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> int:
        """Return the number of ids of a conversation that is rendered whole. Raises LimitReached if the conversation is
        far too long."""
        self._check_far(messages)
        return len(self._recorder.renderer.render(messages, tools).tokens)

    def _check_far(self, messages: Sequence[Message]) -> None:
        check_far(self.id, messages, self._recorder.renderer, self.max_context)

    def bytes_of(self, token: int) -> bytes:
        return self._recorder.renderer.bytes_of(token)

    def trajectory(self, outcome: Outcome, timing: Timing = Timing()) -> Trajectory:
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
        return self._tree.transcripts()

    @property
    def _has_ended(self) -> bool:
        """Whether nothing more belongs to the record: the session is closed, or the attempt has ended."""
        return self._closed or self.journal is not None and self.journal.closed

    def _check_open(self) -> None:
        """Raise RequestEnded if the record is complete. A request may outlive its attempt; its turn would be recorded
        in the next attempt."""
        if self._has_ended:
            raise RequestEnded(f"{self.id}: the attempt of this request has ended")

    async def close(self) -> None:
        self._closed = True
        for reply in tuple(self._under_way):
            await self.abort(reply)
        lanes, self._lanes = sorted(self._lanes), set()
        for lane in lanes:
            await self._recorder.engine.release(self._conversation(lane))

    def _sampling(self, turn: Turn, request: ReplyRequest) -> Sampling:
        """Return the sampling settings of a turn, with as many tokens as the context has room for. Raises LimitReached
        if the context has no room."""
        room = self._room(turn)
        check_length(self.id, turn.length, self._recorder.max_context)
        recorder, seed = self._recorder, self._seed_of(turn.repeat)
        sampling = sampling_of(request, recorder.sampling, stop_ids=recorder.renderer.stop_ids, seed=seed)
        return at_most(sampling, min(sampling.max_tokens, room))

    def _seed_of(self, repeat: int) -> int:
        return self._seed if repeat == 0 else derived_seed(self._seed, "repeat", repeat)

    async def _generate(
        self, turn: Turn, sampling: Sampling, reader: PieceReader | None
    ) -> AsyncGenerator[ReplyPart | Completion]:
        """Sample a reply: yield the pieces that `reader` reads, then the completion."""
        request = GenerateRequest(
            id=request_id(self.id, turn),
            tokens=self._tree.prompt(turn),
            sampling=sampling,
            conversation=self._conversation(turn.lane),
            admission=self._admission,
        )
        self._lanes.add(turn.lane)
        clock = asyncio.get_running_loop().time
        started, reply, completion = clock(), self._reply_id(turn), None
        self._under_way[reply] = request.id
        try:
            with boundary(EngineError, f"engine of {self._recorder.model}"):
                engine, bound = self._recorder.engine, await self._recorder.binder.bind(request)
                if request.id in self._ended:  # before the engine had the request
                    raise self._gave_up(request.id, 0)
                if reader is None:
                    completion = await engine.generate(bound)
                else:
                    stream = cast(AsyncGenerator[Delta | Completion], engine.stream(bound))
                    async with aclosing(stream) as deltas:
                        async for delta in deltas:
                            if isinstance(delta, Completion):
                                completion = delta
                                break
                            for part in reader.read(delta.tokens):
                                yield part
        finally:
            del self._under_way[reply]
            self.generate_s += clock() - started
        if completion is None or not completion.tokens:
            raise self._gave_up(request.id, 0)
        yield completion

    def _gave_up(self, request: str, tokens: int) -> SparringError:
        """Return the error of a request that the engine ended before its reply was whole."""
        if request in self._ended:
            self._ended.discard(request)
            return RequestEnded(f"{request}: ended after {tokens} tokens")
        return EngineError(f"{request}: the engine gave up after {tokens} tokens")

    async def _keep(self, new: Sequence[Segment]) -> None:
        """Append the segments of a new turn to the journal and the store. If the task is cancelled here, the record is
        complete nevertheless."""
        if self.journal is not None:
            self.journal.sampled(self._role, new)
        if self._recorder.turns is not None:
            entries = () if self.journal is None else self.journal.unwritten()
            await self._recorder.turns.put(self.id, new, entries)

    def _write(
        self,
        turn: Turn,
        completion: Completion,
        reply: Message,
        sampling: Sampling,
        recorded: RecordedReply | None,
    ) -> list[Segment]:
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
        reader: PieceReader | None,
    ) -> tuple[Message, str | None]:
        """Return the parsed reply with call ids that are unique in the session (ids of the chat format stay), and the
        client's stop string that ended it, or None."""
        renderer, tokens = self._recorder.renderer, completion.tokens
        parsed = renderer.parse(tokens, request.callable, prompt=turn.added)
        message, stop = without_stop(parsed, request, tokens, turn.added, renderer)
        if recorded is not None and recorded.segment.message is not None:
            return recorded.segment.message, stop
        calls = self._tree.call_ids(turn) if reader is None else reader.calls
        return named(message, calls), stop

    def _room(self, turn: Turn) -> int:
        return self._recorder.max_context - turn.length

    def _conversation(self, lane: int) -> str:
        return f"{self.id}#{lane}"
