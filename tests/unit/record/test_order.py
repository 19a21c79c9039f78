"""The record stands in the order of requests, and the store holds enough to make the tree again."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest
from conversations import SYSTEM, TOOL, answer, say, user
from unit.record.played import playback
from virtual import on_virtual_clock

from sparring.errors import EngineError
from sparring.generation import GenerateRequest, Sampling
from sparring.record.order import conversation, settled, tools_of
from sparring.record.recorder import RecordedSession, Recorder
from sparring.reply import ReplyRequest, whole_reply
from sparring.store.sqlite import SqliteStore
from sparring.testing.clock import run_virtual
from sparring.testing.scripted_engine import ScriptedEngine
from sparring.testing.toy import toy_renderer, toy_task
from sparring.types import Evidence, Limits, Message, Outcome

RENDERER = toy_renderer()
LIMITS = Limits(max_turns=30, max_tokens=10_000, max_tool_calls=100)
OVER = Outcome(kind="completed", reason="answered")


def script(request: GenerateRequest) -> list[int]:
    """Ids that hang on seed and prompt."""
    drawn = hash((request.sampling.seed, request.tokens))
    return RENDERER.tokenizer.encode("".join("abcdefgh"[(drawn >> shift) % 8] for shift in range(0, 30, 3)))


class Delayed(ScriptedEngine):
    """An engine whose requests take their own times, in order of arrival or by their ids."""

    def __init__(self, *delays_s: float, fail_on: tuple[int, ...] = (), by_id: dict[str, float] | None = None) -> None:
        super().__init__(script, fail_on=fail_on)
        self.delays_s, self.by_id = iter(delays_s), by_id or {}

    async def generate(self, request: GenerateRequest):
        """Answer after the next time."""
        await asyncio.sleep(self.by_id.get(request.id, next(self.delays_s, 0.0)))
        return await super().generate(request)


def session(engine: ScriptedEngine, store: SqliteStore | None = None, journal=None) -> RecordedSession:
    """A session with room for many turns."""
    recorder = Recorder(engine, RENDERER, store, sampling=Sampling(max_tokens=64), max_context=20_000)
    return recorder.open(toy_task(limits=LIMITS), rollout_id="r", seed=7, journal=journal)


async def siblings(session: RecordedSession) -> list[object]:
    """Four requests at once, two of them with one prompt, each with a second turn."""

    async def talk(text: str) -> Message:
        reply = await session.complete([user(text)])
        return await session.complete([user(text), reply, user("And?")])

    return await asyncio.gather(*map(talk, "aabc"), return_exceptions=True)


@pytest.mark.parametrize("delays_s", list(permutations((1.0, 2.0, 3.0, 4.0))))
def test_segments_stand_in_the_order_of_requests(delays_s):
    one = session(Delayed(*delays_s))
    run_virtual(siblings(one))
    segments = one.segments
    assert [s.index for s in segments] == list(range(len(segments))) and all(s.place is None for s in segments)
    assert [s.message.content for s in segments[:7] if not s.model] == ["a", "b", "c"]
    assert [s.parent for s in segments[:7]] == [None, 0, 0, None, 3, None, 5]
    assert all(s.parent is None or s.parent < s.index for s in segments)


@on_virtual_clock
async def test_a_failed_sibling_does_not_change_the_seeds_of_others():
    """Before, the next request had the id of one that was under way, and the seed of one that was answered."""
    engine = Delayed(1.0, 3.0, 0.0, 0.0, fail_on=(1,))
    one = session(engine)
    first, second = (asyncio.create_task(whole_reply(one.reply(ReplyRequest([user("Hi")])))) for _ in range(2))
    with pytest.raises(EngineError):
        await first
    third = asyncio.create_task(whole_reply(one.reply(ReplyRequest([user("Ho")]))))
    again = asyncio.create_task(whole_reply(one.reply(ReplyRequest([user("Hi")]))))
    ids = [(await reply).id for reply in (second, third, again)]
    assert len(set(ids)) == 3
    assert len({request.id for request in engine.requests}) == 4
    seeds = [
        request.sampling.seed for request in engine.requests if len(request.tokens) == len(engine.requests[0].tokens)
    ]
    hi = [s.sampling.seed for s in one.segments if s.sampling and s.parent == 0]
    assert hi[0] == 7 and len(set(hi)) == 2 and seeds
    assert [s.message.content for s in one.segments if not s.model] == ["Hi", "Ho"], (
        "the turn that failed kept its place"
    )


@on_virtual_clock
async def test_a_request_without_a_reply_leaves_no_gap():
    engine = Delayed(fail_on=(1, 3))
    one = session(engine)
    for text in ("a", "b", "c", "d"):
        try:
            await one.complete([user(text)])
        except EngineError:
            continue
    assert [(s.index, s.place, s.parent) for s in one.segments] == [(0, 2, None), (1, 3, 0), (2, 6, None), (3, 7, 2)]
    assert one.trajectory(OVER).segments == one.segments


@pytest.mark.parametrize("ended", range(1, 8))
def test_a_record_with_a_kill_between_unordered_siblings_is_resumed(tmp_path: Path, ended: int):
    """Of the turns that are durable, in the order in which they ended, any first few are what a kill leaves."""
    delays_s = {"r#1": 4.0, "r#2": 1.0, "r#4": 3.0, "r#6": 2.0}
    whole = session(Delayed(by_id=delays_s))
    run_virtual(siblings(whole))
    store = SqliteStore(tmp_path / "store.sqlite")
    first = session(Delayed(by_id=delays_s), store)
    run_virtual(siblings(first))
    rows = store.turns("r")
    assert settled(rows) == first.segments == whole.segments
    sampled = [at for at, row in enumerate(rows) if row.model]
    left = settled(rows[: sampled[ended - 1] + 1])
    store.close()

    again = SqliteStore(tmp_path / "again.sqlite")
    again.append_turns([("r", rows[: sampled[ended - 1] + 1])])
    engine = Delayed(by_id=delays_s)
    second = session(engine, again, playback(left))
    run_virtual(siblings(second))
    assert len(engine.requests) == 8 - ended, "what is durable is not sampled again"
    assert second.segments == whole.segments, "bitwise what nobody killed"
    assert settled(again.turns("r")) == second.segments, "and so the store says"
    again.close()


@on_virtual_clock
async def test_the_store_contains_the_whole_tree(tmp_path: Path):
    store = SqliteStore(tmp_path / "store.sqlite")
    other = replace(TOOL, name="other")
    evidence = Evidence(agent="sub", parent="main", label="auxiliary", wishes={"temperature": 0.5, "betas": ["x"]})
    asked: list[tuple[list[Message], tuple, Evidence]] = []
    one = session(ScriptedEngine(script), store)

    async def ask(messages: list[Message], tools=(), evidence=Evidence()) -> Message:
        asked.append((messages, tools, evidence))
        return (await whole_reply(one.reply(ReplyRequest(messages, tools, evidence=evidence)))).message

    start = [SYSTEM, user("Hi"), user("there")]
    first = await ask(start, (TOOL,))
    second = await ask([*start, first, answer("1"), answer("2"), user("Go on.")], (TOOL,))
    await ask([*start, first, answer("1"), answer("3")], (TOOL,))
    await ask([*start, first, answer("1"), answer("2"), user("Go on."), second, user("So?")], (TOOL, other))
    await ask([SYSTEM, user("Hi"), user("you"), say("Mine."), user("?")], (TOOL,))
    await ask([user("A title for it")], (), evidence)
    await ask([*start], (TOOL,))
    segments = settled(store.turns("r"))
    assert segments == one.segments
    replies = [segment for segment in segments if segment.model]
    for segment, (messages, tools, evidence) in zip(replies, asked, strict=True):
        assert conversation(segments, segment.parent) == tuple(messages)
        assert tools_of(segments, segment.index) == tools
        assert (segment.evidence or Evidence()) == evidence and segment.label == (evidence.label or "agent")
    roots = [segment for segment in segments if segment.parent is None]
    assert [root.fork and root.fork.reason for root in roots] == [None, "tools", "edited", "auxiliary"]
    assert sum(len(segment.earlier) + 1 for segment in segments if not segment.model) == 13, "each told message once"
    store.close()


def test_an_undelivered_reply_is_lost_in_the_store_too(tmp_path: Path):
    store = SqliteStore(tmp_path / "store.sqlite")
    one = session(ScriptedEngine(script), store)

    async def talk() -> None:
        ids = [(await whole_reply(one.reply(ReplyRequest([user(text)])))).id for text in "abc"]
        one.deliver(ids[0], False)
        one.deliver(ids[1], False)
        one.deliver(ids[1], True)
        one.deliver(ids[2], True)
        one.deliver("none of ours", False)
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    run_virtual(talk())
    states = [(s.label, s.delivered) for s in one.trajectory(OVER).segments if s.model]
    assert states == [("lost", False), ("agent", True), ("agent", True)]
    stored = [(s.label, s.delivered) for s in settled(store.turns("r")) if s.model]
    assert stored == [("lost", False), ("agent", True), ("agent", None)], "what nobody says is delivered"
    again = session(ScriptedEngine(script), None, playback(settled(store.turns("r"))))

    async def rebuild() -> None:
        for text in "abc":
            await whole_reply(again.reply(ReplyRequest([user(text)])))

    run_virtual(rebuild())
    assert [(s.label, s.delivered) for s in again.segments if s.model] == stored
    store.close()
