"""Replies in pieces: together they are the reply, the end waits for the store, and what was sampled before somebody
left is kept."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from unit.record.played import playback
from virtual import on_virtual_clock

from sparring.errors import EngineError
from sparring.generation import Completion, Delta, GenerateRequest
from sparring.record.recorder import RecordedSession, Recorder
from sparring.render.demonstrate import reply_tokens
from sparring.reply import ReplyHead, ReplyRequest, SampledReply, whole_reply
from sparring.rollout.journal import Playback
from sparring.store.sqlite import SqliteStore
from sparring.testing.scripted_engine import ScriptedEngine
from sparring.testing.toy import ADD, toy_renderer, toy_task
from sparring.types import Limits, Message, ReplyPiece, ToolCall

RENDERER = toy_renderer()
USER = Message(role="user", content="What is 2 + 3?")
CALL = ToolCall(id="call_0", name="add", arguments={"a": 2, "b": 3})
REPLY = Message(role="assistant", content="I add the two numbers.", tool_calls=(CALL, CALL))
LIMITS = Limits(max_turns=20, max_tokens=4000, max_tool_calls=20)


class Stepping(ScriptedEngine):
    """A scripted engine that makes each token when it is let."""

    def __init__(self, message: Message = REPLY) -> None:
        super().__init__(lambda request: reply_tokens(RENDERER, message, (ADD,)))
        self.steps = asyncio.Semaphore(0)

    async def stream(self, request: GenerateRequest) -> AsyncIterator[Delta | Completion]:
        """Yield the script's tokens, one for each step."""
        async for piece in super().stream(request):
            if not isinstance(piece, Completion):
                await self.steps.acquire()
            yield piece

    async def abort(self, request: str) -> None:
        """End a request; what it waits for comes."""
        await super().abort(request)
        self.steps.release()


def session_of(engine: Any, store: SqliteStore | None = None, journal: Playback | None = None) -> RecordedSession:
    recorder = Recorder(engine, RENDERER, store)
    return recorder.open(toy_task(), rollout_id="r", seed=7, limits=LIMITS, journal=journal)


def shown(parts: Sequence[Any]) -> Message:
    texts = {"reasoning": "", "text": ""}
    for part in parts:
        if isinstance(part, ReplyPiece) and part.call is None:
            texts[part.kind] += part.text
    calls = tuple(part.call for part in parts if isinstance(part, ReplyPiece) and part.call is not None)
    return Message(role="assistant", content=texts["text"], reasoning=texts["reasoning"] or None, tool_calls=calls)


@on_virtual_clock
async def test_pieces_add_up_to_the_whole_reply() -> None:
    sessions = [session_of(ScriptedEngine(lambda request: reply_tokens(RENDERER, REPLY, (ADD,)))) for _ in range(2)]
    whole = await whole_reply(sessions[0].reply(ReplyRequest([USER], (ADD,))))
    parts = [part async for part in sessions[1].reply(ReplyRequest([USER], (ADD,), in_pieces=True))]
    assert isinstance(parts[0], ReplyHead) and parts[-1] == whole
    assert (parts[0].id, parts[0].prompt_tokens) == (whole.id, whole.prompt_tokens)
    assert shown(parts) == whole.message and len(parts) > 10
    assert [call.id for call in whole.message.tool_calls] == ["call_0_0", "call_0_1"]


@on_virtual_clock
async def test_the_end_is_yielded_when_the_turn_is_durable(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "store.sqlite")
    session = session_of(ScriptedEngine(lambda request: reply_tokens(RENDERER, REPLY, (ADD,))), store)
    durable = [
        store.turns("r")[-1].tokens == part.tokens
        async for part in session.reply(ReplyRequest([USER], (ADD,), in_pieces=True))
        if isinstance(part, SampledReply)
    ]
    assert durable == [True]
    store.close()


@pytest.mark.parametrize("stop", [("two",), (" the t", "numbers"), ("I",)])
@on_virtual_clock
async def test_a_clients_stop_string_is_not_shown(stop: tuple[str, ...]) -> None:
    session = session_of(ScriptedEngine(lambda request: reply_tokens(RENDERER, REPLY, (ADD,))))
    parts = [part async for part in session.reply(ReplyRequest([USER], (ADD,), stop=stop, in_pieces=True))]
    reply = parts[-1]
    assert isinstance(reply, SampledReply) and reply.stop == stop[0]
    assert shown(parts).content == reply.message.content == REPLY.content.partition(stop[0])[0]
    assert stop[0] in RENDERER.decode(reply.tokens)


async def begun(stream: AsyncIterator[Any], engine: Stepping, steps: int) -> list[Any]:
    """Let an engine make some tokens and read what they show."""
    for _ in range(steps):
        engine.steps.release()
    parts: list[Any] = []
    while len(parts) < 2:
        parts.append(await anext(stream))
    return parts


@on_virtual_clock
async def test_tokens_sampled_before_the_consumer_left_are_kept_as_lost(tmp_path: Path) -> None:
    store, engine = SqliteStore(tmp_path / "store.sqlite"), Stepping()
    session = session_of(engine, store)
    async with aclosing(session.reply(ReplyRequest([USER], (ADD,), in_pieces=True))) as stream:  # type: ignore[type-var]
        await begun(stream, engine, 4)
    kept = session.segments[-1]
    assert (kept.finish_reason, kept.label, kept.delivered) == ("abort", "lost", False)
    assert 1 <= len(kept.tokens) <= 5 and session.usage.sampled_tokens == len(kept.tokens)
    assert store.turns("r") == list(session.segments)

    for _ in range(200):
        engine.steps.release()
    again = await whole_reply(session.reply(ReplyRequest([USER], (ADD,))))  # another turn, with numbers of its own
    seeds = [segment.sampling.seed for segment in session.segments if segment.sampling is not None]
    assert again.finish_reason == "stop" and len(set(seeds)) == 2
    store.close()


@on_virtual_clock
async def test_a_consumer_that_is_cancelled_drops_the_turn() -> None:
    engine = Stepping()
    session = session_of(engine)
    reached = asyncio.Event()

    async def consume() -> None:
        async for part in session.reply(ReplyRequest([USER], (ADD,), in_pieces=True)):
            if isinstance(part, ReplyPiece):
                reached.set()

    for _ in range(4):
        engine.steps.release()
    consumer = asyncio.create_task(consume())
    await reached.wait()
    consumer.cancel()
    await asyncio.gather(consumer, return_exceptions=True)
    assert session.segments == () and session.usage.sampled_tokens == 0
    for _ in range(200):
        engine.steps.release()
    await whole_reply(session.reply(ReplyRequest([USER], (ADD,))))
    assert engine.requests[0].sampling.seed == engine.requests[1].sampling.seed, "it is the same turn"


@on_virtual_clock
async def test_tokens_of_a_given_up_reply_are_kept_and_a_rebuilt_rollout_continues_after_it(tmp_path: Path) -> None:
    store, engine = SqliteStore(tmp_path / "store.sqlite"), Stepping()
    session = session_of(engine, store)
    stream = session.reply(ReplyRequest([USER], (ADD,), in_pieces=True))
    parts = await begun(stream, engine, 4)
    await engine.abort(parts[0].id)
    with pytest.raises(EngineError, match="gave up after"):
        async for _ in stream:
            pass
    recorded = store.turns("r")
    assert recorded[-1].finish_reason == "abort" and recorded[-1].label == "lost"

    replies = playback(recorded)
    plain = ScriptedEngine(lambda request: reply_tokens(RENDERER, REPLY, (ADD,)))
    rebuilt = session_of(plain, store, replies)
    reply = await whole_reply(rebuilt.reply(ReplyRequest([USER], (ADD,))))
    assert reply.message.content == REPLY.content and replies.num_left == 0
    assert list(rebuilt.segments[: len(recorded)]) == recorded and rebuilt.segments[-1].label == "agent"
    assert plain.requests[0].sampling.seed != recorded[-1].sampling.seed  # type: ignore[union-attr]
    assert store.turns("r") == list(rebuilt.segments)
    store.close()


@on_virtual_clock
async def test_a_recorded_reply_is_shown_whole(tmp_path: Path) -> None:
    engine = ScriptedEngine(lambda request: reply_tokens(RENDERER, REPLY, (ADD,)))
    session = session_of(engine)
    whole = await whole_reply(session.reply(ReplyRequest([USER], (ADD,))))
    replies = playback(session.segments)
    parts = [
        part async for part in session_of(engine, None, replies).reply(ReplyRequest([USER], (ADD,), in_pieces=True))
    ]
    assert shown(parts) == whole.message and len(engine.requests) == 1
