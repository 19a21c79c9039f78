"""Limits, usage, seeds and durability of recorded sessions."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from conversations import ODD, TOOL, answer, call, say, user
from virtual import on_virtual_clock

from sparring.errors import BadInput, EngineError, LimitReached, StoreError
from sparring.generation import Sampling
from sparring.record.recorder import RecordedSession, Recorder
from sparring.render.demonstrate import demonstration_tokens, reply_tokens
from sparring.reply import ReplyRequest, whole_reply
from sparring.testing.clock import run_virtual
from sparring.testing.scripted_engine import ScriptedEngine, replies
from sparring.testing.toy import toy_renderer, toy_task
from sparring.types import Limits, Message, Outcome, Segment, WeightRef

TOOLS = (TOOL,)
RENDERER = toy_renderer()


class TurnList:
    """The part of a store that sessions use, in memory."""

    def __init__(self, full_after: int = 1000) -> None:
        self.turns: list[tuple[str, tuple[Segment, ...]]] = []
        self.full_after = full_after

    def append_turns(self, turns: Sequence[tuple[str, Sequence[Segment]]], entries: object = ()) -> None:
        """Keep the turns, until the disk is full."""
        if len(self.turns) + len(turns) > self.full_after:
            raise StoreError("disk full")
        self.turns += [(rollout, tuple(segments)) for rollout, segments in turns]


def says(*messages: Message, **options: object) -> ScriptedEngine:
    """An engine that samples the canonical ids of these replies, one per request."""
    planned = iter([reply_tokens(RENDERER, message, TOOLS) for message in messages])
    return ScriptedEngine(lambda request: next(planned), **options)


def session(engine: ScriptedEngine, store: TurnList | None = None, **limits: int) -> RecordedSession:
    """A session on this engine under these limits."""
    recorder = Recorder(
        engine, RENDERER, store, sampling=Sampling(max_tokens=limits.pop("turn", 256)), max_context=1500
    )
    return recorder.open(toy_task(), rollout_id="r", seed=7, limits=Limits(**limits))


@on_virtual_clock
async def test_the_record_is_what_was_sampled():
    engine = says(call("1"), say("One."))
    store = TurnList()
    one = session(engine, store)
    first = await one.complete([user("Hi")], TOOLS)
    assert len(store.turns) == 1, "durable before the reply is returned"
    await engine.pull(WeightRef(model="policy", version=3, checksum="", transport="inline", location=None))
    await one.complete([user("Hi"), first, answer("1")], TOOLS)
    trajectory = one.trajectory(Outcome(kind="completed", reason="answered"))
    (branch,) = trajectory.branches()
    assert [s for _, turn in store.turns for s in turn] == list(branch)
    assert engine.requests[1].tokens == sum((s.tokens for s in branch[:3]), ())
    assert [s.versions.expand()[0] for s in branch if s.model] == [0, 3]
    assert all(s.sampling.seed == 7 and s.sampling.stop == RENDERER.stop_ids for s in branch if s.model)
    sampled = [s for s in branch if s.model]
    assert trajectory.usage.sampled_tokens == sum(len(s.tokens) for s in sampled)
    assert trajectory.usage.prompt_tokens == sum(len(r.tokens) for r in engine.requests)
    assert (trajectory.usage.turns, trajectory.usage.tool_calls) == (2, 1)


@on_virtual_clock
async def test_a_live_rollout_equals_the_demonstration():
    messages = [user(ODD), call(ODD, content="So:"), answer(ODD), call("2"), answer("2"), answer("3"), say("Four.")]
    engine = says(*(m for m in messages if m.role == "assistant"))
    one = session(engine)
    for at, message in enumerate(messages):
        if message.role == "assistant":
            reply = await one.complete(messages[:at], TOOLS)
            assert reply.content == message.content and len(reply.tool_calls) == len(message.tool_calls)
    rendered = demonstration_tokens(RENDERER, messages, TOOLS)
    (branch,) = one.trajectory(Outcome(kind="completed", reason="answered")).branches()
    assert rendered.tokens == sum((s.tokens for s in branch), ())
    assert rendered.sampled == sum(((s.model is not None,) * len(s.tokens) for s in branch), ())


@on_virtual_clock
async def test_non_canonical_ids_stay_in_the_next_prompt():
    odd = [id for letter in "answer" for id in RENDERER.tokenizer.encode(letter)]
    engine = ScriptedEngine(lambda request: odd)
    one = session(engine)
    reply = await one.complete([user("Hi")])
    await one.complete([user("Hi"), reply, user("Again")])
    first, second = engine.requests
    assert second.tokens[: len(first.tokens) + len(odd) + 1] == (*first.tokens, *odd, RENDERER.stop_ids[0])
    again = RENDERER.render([user("Hi"), say("answer"), user("Again")], ()).tokens
    assert RENDERER.decode(again) == RENDERER.decode(second.tokens) and again != second.tokens, "the drift is real"


def limit(one: RecordedSession, conversation: list[Message]) -> LimitReached:
    """Talk until a limit is hit; `conversation` holds what the world says, in turn."""

    async def talk() -> LimitReached:
        history: list[Message] = []
        with pytest.raises(LimitReached) as caught:
            for message in conversation:
                history += [message, await one.complete([*history, message], TOOLS)]
        return caught.value

    return run_virtual(talk())[0]


def test_turns_are_limited():
    engine = says(say("A"), say("B"), say("C"))
    reached = limit(session(engine, max_turns=2), [user("1"), user("2"), user("3")])
    assert reached.reason == "max_turns" and len(engine.requests) == 2


def test_turns_of_concurrent_requests_are_limited():
    """One waits while the others use up the turns."""
    engine = ScriptedEngine(replies(["A"], RENDERER.tokenizer.encode), latency_s=1.0)
    one = session(engine, max_turns=2)

    async def talk() -> list[object]:
        return await asyncio.gather(*(one.complete([user(f"{n}")]) for n in range(3)), return_exceptions=True)

    (*answered, refused), _ = run_virtual(talk())
    assert answered == [say("A")] * 2 and len(engine.requests) == 2
    assert isinstance(refused, LimitReached) and refused.reason == "max_turns"


def test_sampled_tokens_of_a_rollout_are_limited_and_truncated_replies_are_kept():
    reply = reply_tokens(RENDERER, say("A long answer indeed"), TOOLS)
    engine = says(say("A long answer indeed"), say("A long answer indeed"), say("C"))
    one = session(engine, max_tokens=len(reply) + 3)
    assert limit(one, [user("1"), user("2"), user("3")]).reason == "max_tokens"
    assert [r.sampling.max_tokens for r in engine.requests] == [len(reply) + 3, 3]
    assert one.segments[-1].tokens == reply[:3] and one.usage.sampled_tokens == len(reply) + 3
    assert limit(one, [user("4")]).reason == "max_tokens" and len(engine.requests) == 2


def test_one_turn_is_limited():
    one = session(says(say("A long answer indeed")), turn=4)
    assert limit(one, [user("1")]).reason == "max_tokens"
    assert len(one.segments[-1].tokens) == 4 and one.segments[-1].message is not None


def test_tool_calls_are_limited_and_the_last_is_recorded():
    one = session(says(call("1"), call("2"), call("3")), max_tool_calls=1)
    assert limit(one, [user("1"), answer("1"), answer("2")]).reason == "max_tool_calls"
    assert one.usage.tool_calls == 2 and len(one.segments) == 4


def test_the_context_is_limited_before_and_while_sampling():
    assert limit(session(says(say("A"))), [user("word " * 1500)]).reason == "context_length"
    length = len(RENDERER.render([user("Hi")], TOOLS).tokens)
    recorder = Recorder(says(say("A long answer")), RENDERER, max_context=length + 2)
    one = recorder.open(toy_task(), rollout_id="r", seed=0)
    assert limit(one, [user("Hi")]).reason == "context_length" and len(one.segments[-1].tokens) == 2
    with pytest.raises(BadInput, match="max_context"):
        Recorder(says(), RENDERER, max_context=1)


def test_a_repeated_request_draws_other_numbers_and_a_retry_draws_the_same():
    asked = ScriptedEngine(replies(["A"], RENDERER.tokenizer.encode))
    failing = ScriptedEngine(replies(["A"], RENDERER.tokenizer.encode), fail_on=[1])

    async def twice(one: RecordedSession) -> None:
        for _ in range(2):
            try:
                await one.complete([user("Hi")])
            except EngineError:
                assert one.segments == () and one.usage.turns == 0

    one, two = session(asked), session(failing, max_turns=1)
    run_virtual(twice(one))
    run_virtual(twice(two))
    seeds = [request.sampling.seed for request in asked.requests]
    assert seeds[0] == 7 != seeds[1]
    assert [request.sampling.seed for request in failing.requests] == [7, 7]
    assert [s.parent for s in one.segments] == [None, 0, 0] and len(two.segments) == 2


def test_roles_have_their_own_record_and_their_own_numbers():
    engine = ScriptedEngine(replies(["A"], RENDERER.tokenizer.encode))
    store = TurnList()
    recorder = Recorder(engine, RENDERER, store)
    for role in ("policy", "critic"):
        run_virtual(recorder.open(toy_task(), rollout_id="r", seed=7, role=role).complete([user("Hi")]))
    assert [id for id, _ in store.turns] == ["r", "r/critic"]
    assert len({request.sampling.seed for request in engine.requests}) == 2


def test_a_full_disk_is_reported_and_foreign_errors_are_typed():
    with pytest.raises(StoreError, match="disk full"):
        run_virtual(session(says(say("A")), TurnList(full_after=0)).complete([user("Hi")]))
    with pytest.raises(EngineError, match="StopIteration|RuntimeError"):
        run_virtual(session(says()).complete([user("Hi")]))
    with pytest.raises(EngineError, match="gave up after 0 tokens"):
        silent = Recorder(ScriptedEngine(lambda r: ()), RENDERER, sampling=Sampling(stop=(0,), max_tokens=0))
        run_virtual(silent.open(toy_task(), rollout_id="r", seed=0).complete([user("Hi")]))


@on_virtual_clock
async def test_the_cache_is_kept_along_a_lane_and_released_at_the_end():
    engine = says(call("1"), say("A"), say("B"))
    one = session(engine)
    first = await one.complete([user("Hi")], TOOLS)
    for text in "12":
        await one.complete([user("Hi"), first, answer(text)], TOOLS)
    assert len(engine.held) == 2
    await one.close()
    first, second, fork = engine.requests
    assert first.conversation == second.conversation != fork.conversation
    assert one.usage.cached_tokens == len(first.tokens) + len(one.segments[1].tokens)
    assert engine.held == {}


def test_concurrent_requests_share_the_budget():
    """One that others leave too little waits: none is cut by what another might have used and did not."""
    engine = ScriptedEngine(replies(["A"], RENDERER.tokenizer.encode), latency_s=1.0)
    one = session(engine, max_tokens=520)

    async def talk() -> list[object]:
        asked = (one.complete([user(f"{n}")]) for n in range(4))
        return await asyncio.gather(*asked, return_exceptions=True)

    replies_, elapsed_s = run_virtual(talk())
    assert [r.sampling.max_tokens for r in engine.requests] == [256] * 4 and engine.most_in_flight == 2
    assert replies_ == [say("A")] * 4 and elapsed_s == 2.0
    assert one.generate_s == 4.0 and [s.index for s in one.segments] == list(range(8))
    assert [s.message.content for s in one.segments if not s.model] == ["0", "1", "2", "3"]


def test_an_exhausted_budget_ends_all_waiting_requests():
    engine = ScriptedEngine(replies(["A long answer, of many tokens"], RENDERER.tokenizer.encode), latency_s=1.0)
    one = session(engine, max_tokens=8, turn=8)

    async def talk() -> list[object]:
        return await asyncio.gather(*(one.complete([user(f"{n}")]) for n in range(3)), return_exceptions=True)

    outcomes, elapsed_s = run_virtual(talk())
    assert [outcome.reason for outcome in outcomes] == ["max_tokens"] * 3 and elapsed_s == 1.0
    assert len(engine.requests) == 1 and one.usage.sampled_tokens == 8 and len(one.segments) == 2


def test_the_grant_of_a_failed_turn_goes_to_a_waiting_request():
    engine = ScriptedEngine(replies(["A"], RENDERER.tokenizer.encode), latency_s=1.0, fail_on=(1,))
    one = session(engine, max_turns=1)

    async def talk() -> list[object]:
        asked = [asyncio.create_task(one.complete([user(f"{n}")])) for n in range(3)]
        await asyncio.sleep(0.5)
        asked[1].cancel()  # while it waits
        return await asyncio.gather(*asked, return_exceptions=True)

    (failed, cancelled, answered), _ = run_virtual(talk())
    assert isinstance(failed, EngineError) and isinstance(cancelled, asyncio.CancelledError)
    assert answered == say("A") and one.usage.turns == 1
    assert len({request.id for request in engine.requests}) == 2


def test_a_client_adds_stop_strings_to_the_runs():
    engine = says(say("One, two, three, four."), say("One, two, three, four."))
    recorder = Recorder(engine, RENDERER, sampling=Sampling(max_tokens=64, stop_strings=("three",)))
    session = recorder.open(toy_task(), rollout_id="r", seed=7)

    async def talk() -> list[str]:
        first = await whole_reply(session.reply(ReplyRequest([user("Count.")], stop=("two", "three", "two"))))
        return [first.message.content, (await session.complete([user("Count.")])).content]

    texts, _ = run_virtual(talk())
    assert [request.sampling.stop_strings for request in engine.requests] == [("three", "two"), ("three",)]
    assert texts == ["One, ", "One, two, three"], "the client's own string is left out, as its vendor does"
