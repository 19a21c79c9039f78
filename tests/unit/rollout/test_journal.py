"""Recorded replies answer the requests that they answered before, in their order, and no others."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
from conversations import TOOL, say, user
from unit.record.played import playback
from virtual import on_virtual_clock

from sparring.errors import EngineError, LimitReached, NotRebuildable, RequestEnded
from sparring.generation import Constraint, GenerateRequest, Sampling
from sparring.log import Answered, LogEntry
from sparring.record.order import settled
from sparring.record.recorder import RecordedSession, Recorder
from sparring.reply import ReplyRequest, whole_reply
from sparring.rollout.attempts import Attempts
from sparring.rollout.blame import AttemptCalls, Successes, WorldCalls
from sparring.rollout.journal import PATIENCE_S, Journal, Journals, Playback
from sparring.rollout.play import RolloutRequest
from sparring.store.sqlite import SqliteStore
from sparring.testing.clock import run_virtual
from sparring.testing.scripted_engine import ScriptedEngine
from sparring.testing.toy import toy_renderer, toy_task
from sparring.types import Limits, Message, Segment

RENDERER = toy_renderer()


def script(request: GenerateRequest) -> tuple[int, ...]:
    """Ids that hang on seed and prompt."""
    drawn = hash((request.sampling.seed, request.tokens))
    return tuple(RENDERER.tokenizer.encode("".join("abcdefgh"[(drawn >> shift) % 8] for shift in range(0, 30, 3))))


class TurnList:
    """The part of a store that sessions use, in memory."""

    def __init__(self) -> None:
        self.turns: list[tuple[str, tuple[Segment, ...]]] = []

    def append_turns(self, turns: Sequence[tuple[str, Sequence[Segment]]], entries: Sequence[object] = ()) -> None:
        """Keep the turns."""
        self.turns += [(rollout, tuple(segments)) for rollout, segments in turns]


class SlowFirst(ScriptedEngine):
    """An engine whose first request takes longest."""

    async def generate(self, request: GenerateRequest):
        """Answer, sooner with every request."""
        await asyncio.sleep(10.0 / (len(self.requests) + 1))
        return await super().generate(request)


def session(
    engine: ScriptedEngine,
    journal: Playback | None = None,
    store: TurnList | None = None,
    role: str = "policy",
    **limits: int,
) -> RecordedSession:
    """A session, from a record if there is one."""
    recorder = Recorder(engine, RENDERER, store, sampling=Sampling(max_tokens=256), max_context=1500)
    return recorder.open(toy_task(), rollout_id="r", seed=7, role=role, limits=Limits(**limits), journal=journal)


async def branches(one: RecordedSession, count: int = 3) -> list[Message]:
    """Three conversations at once, two with the same prompt; each of two turns."""

    async def talk(text: str) -> Message:
        reply = await one.complete([user(text)])
        return await one.complete([user(text), reply, user("And?")])

    return await asyncio.gather(*(talk(text) for text in ("a", "a", "b")[:count]))


def recorded(one: RecordedSession, turns: int | None = None) -> Playback:
    """The record of a session's first turns."""
    last = len(one.segments) if turns is None else [s.index for s in one.segments if s.model][turns - 1] + 1
    return playback(one.segments[:last])


@pytest.mark.parametrize("turns", range(1, 7))
def test_a_record_of_concurrent_requests_is_reproduced(turns: int) -> None:
    first = session(SlowFirst(script))
    said, _ = run_virtual(branches(first))
    again, store = ScriptedEngine(script), TurnList()
    second = session(again, recorded(first, turns), store)
    assert run_virtual(branches(second))[0] == said
    assert len(again.requests) == 6 - turns, "what is recorded is not sampled again"
    given = [s for s in first.segments if s.model][:turns]
    assert [s for s in second.segments if s.model][:turns] == given
    assert second.segments[: given[-1].index + 1] == first.segments[: given[-1].index + 1]
    assert {(s.tokens, s.sampling.seed) for s in second.segments if s.sampling} == {
        (s.tokens, s.sampling.seed) for s in first.segments if s.sampling
    }
    assert len(store.turns) == 6 - turns, "what is durable is not written again"


def test_a_truncated_reply_hits_the_same_limit() -> None:
    first, engine = session(ScriptedEngine(script), max_tokens=4), ScriptedEngine(script)
    with pytest.raises(LimitReached, match="cut short"):
        run_virtual(first.complete([user("Hi")]))
    second = session(engine, playback(first.segments), max_tokens=4)
    with pytest.raises(LimitReached, match="cut short") as caught:
        run_virtual(second.complete([user("Hi")]))
    assert caught.value.reason == "max_tokens" and engine.requests == []
    assert second.usage == first.usage and [s.tokens for s in second.segments] == [s.tokens for s in first.segments]


def test_a_reply_keeps_its_share_of_the_budget() -> None:
    """The last request had less left to it than those before."""
    first = session(SlowFirst(script), max_tokens=280)
    run_virtual(branches(first, 2))
    second = session(ScriptedEngine(script), recorded(first), max_tokens=280)
    run_virtual(branches(second, 2))
    assert second.segments == first.segments
    assert len({s.sampling.max_tokens for s in first.segments if s.sampling}) > 1


@pytest.mark.parametrize(
    ("history", "options", "message"),
    [
        ([user("Ho")], {}, "policy: a request is not the recorded one, with 1 recorded replies left"),
        ([user("Hi")], {"tools": (TOOL,)}, "a request is not the recorded one"),
        ([user("Hi")], {"constraint": Constraint(kind="regex", source="a+")}, "has other settings of sampling"),
    ],
)
def test_a_request_that_differs_from_the_record_is_refused(history, options, message: str) -> None:
    first, engine = session(ScriptedEngine(script)), ScriptedEngine(script)
    run_virtual(first.complete([user("Hi")]))
    replies = recorded(first)
    second = session(engine, replies)
    for _ in range(2):
        with pytest.raises(NotRebuildable, match=message):
            run_virtual(second.complete(history, **options))
        history, options = [user("Hi")], {}  # the recorded one comes too late
    assert engine.requests == [] and second.segments == () and replies.difference is not None


def test_an_unrecorded_request_without_others_is_refused_after_a_while() -> None:
    first = session(ScriptedEngine(script))
    run_virtual(branches(first))
    replies = recorded(first)
    second = session(ScriptedEngine(script), replies)

    async def other() -> None:
        with pytest.raises(NotRebuildable, match="a request is not in the record, nothing else went on for 60 s"):
            await second.complete([user("something else")])

    assert run_virtual(other())[1] == PATIENCE_S


@pytest.mark.parametrize("call_s", [1.0, 2.5 * PATIENCE_S])
def test_a_role_that_was_not_answered_before_waits_for_the_one_that_was(call_s: float) -> None:
    """The policy asks again after a call of the world, however long that takes."""
    first = session(ScriptedEngine(script))
    run_virtual(branches(first, 1))
    replies, engine = recorded(first), ScriptedEngine(script)
    one, other = session(engine, replies), session(engine, replies, role="user")

    async def policy() -> None:
        reply = await one.complete([user("a")])
        with AttemptCalls(WorldCalls(Successes()), replies).call("step", "policy", reply):
            await asyncio.sleep(call_s)
        await one.complete([user("a"), reply, user("And?")])

    async def talk() -> None:
        await asyncio.gather(other.complete([user("Hi")]), policy())

    run_virtual(talk())
    assert one.segments == first.segments and len(engine.requests) == 1


@pytest.mark.parametrize("asked_before", [True, False])
@on_virtual_clock
async def test_a_request_that_outlives_its_attempt_is_no_turn_of_the_next(asked_before: bool) -> None:
    """A harness whose attempt breaks may leave a task behind, which goes on beside the next attempt."""
    journal, engine, store = Journal("r"), ScriptedEngine(script, latency_s=1.0), TurnList()
    ended, again = (session(engine, Playback(journal), store) for _ in range(2))
    left_behind = asyncio.create_task(ended.complete([user("Hi")])) if asked_before else None
    await asyncio.sleep(0.5)
    assert isinstance(ended.journal, Playback)
    ended.journal.close()
    await again.complete([user("Hi")])
    with pytest.raises(RequestEnded):
        await (left_behind or ended.complete([user("Hi")]))
    await ended.close()
    await again.close()
    assert journal.segments()["policy"] == again.segments == store.turns[0][1] and len(store.turns) == 1
    assert engine.held == {} and len(engine.requests) == 1 + asked_before


@on_virtual_clock
async def test_a_closed_session_ends_its_requests() -> None:
    engine, store = ScriptedEngine(script, latency_s=1.0), TurnList()
    one = session(engine, store=store)
    left_behind = asyncio.create_task(one.complete([user("Hi")]))
    await asyncio.sleep(0.5)
    await one.close()
    with pytest.raises(RequestEnded):
        await left_behind
    assert store.turns == [] and one.segments == () and engine.held == {}


def test_time_that_is_over_after_the_attempt_is_not_that_of_the_next() -> None:
    journal = Journal("r")
    ended = Playback(journal)
    ended.close()
    assert ended.timed_out(True, turn=1, seconds=2.0) and journal.events == []


@on_virtual_clock
async def test_failed_concurrent_requests_keep_their_own_seeds() -> None:
    """The second of two with one prompt goes on; the first fails and comes again: it is the first still."""
    engine = SlowFirst(script, fail_on=(1,))
    one = session(engine)
    first, second = asyncio.create_task(one.complete([user("Hi")])), asyncio.create_task(one.complete([user("Hi")]))
    with pytest.raises(EngineError):
        await asyncio.gather(first, second)
    await asyncio.gather(first, second, return_exceptions=True)
    await one.complete([user("Hi")])
    await one.complete([user("Hi"), say("no"), user("Hi")])
    await one.complete([user("Hi")])
    same = [s.sampling.seed for s in one.segments if s.sampling and s.parent == 0]
    assert len(same) == len(set(same)) == 3


@on_virtual_clock
async def test_the_journal_in_memory_is_what_the_store_keeps(tmp_path: Path) -> None:
    """With requests at once, a reply that its client never got, and a request that comes again after it."""
    store, journal = SqliteStore(tmp_path / "store.sqlite"), Journal("r")
    recorder = Recorder(SlowFirst(script), RENDERER, store, sampling=Sampling(max_tokens=64), max_context=1500)
    one = recorder.open(toy_task(), rollout_id="r", seed=7, journal=Playback(journal))
    await branches(one)
    lost = await whole_reply(one.reply(ReplyRequest([user("c")])))
    one.deliver(lost.id, False)
    await one.complete([user("c")])
    recorded = journal.segments()["policy"]
    assert recorded == one.segments == settled(store.turns("r"))
    assert [segment.label for segment in recorded if segment.model].count("lost") == 1
    store.close()


def test_what_came_before_the_first_turn_is_kept(tmp_path: Path) -> None:
    """A reward may arrive before the policy has replied."""
    store = SqliteStore(tmp_path / "store.sqlite")
    Journals(store).new("rl/0/0").rewarded({"reward": 0.5})
    answer = {"role": "", "number": 0, "digest": 1}
    store.record(LogEntry(stage="rl", kind="observation", name="rl/0/0", data=answer))
    ((journal, _),) = Journals(store).unfinished("rl/0/0")
    assert journal.rewards == [{"reward": 0.5}] and journal.answers() == {"": {0: Answered(**answer)}}
    attempts = Attempts(
        "rl/0/0", RolloutRequest(task=toy_task(), index=0, seed=7).rollout, 3, WorldCalls(Successes()), Journals(store)
    )
    assert attempts.journal.rewards == journal.rewards and attempts.finish() == ()
    store.close()
