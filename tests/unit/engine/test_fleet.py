"""Several engines as one: requests stay where their cache is, and go on elsewhere when an engine dies or stands still."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial, wraps
from typing import Any

import pytest
from virtual import on_virtual_clock

from sparring.engine.fleet import CATCH_UPS, Fleet
from sparring.engine.turn_pieces import joined
from sparring.errors import EngineError, RequestRefused, WeightsError
from sparring.generation import Completion, Delta, GenerateRequest, Sampling, ScoreRequest, Scores
from sparring.testing.clock import run_virtual
from sparring.testing.scripted_engine import ScriptedEngine
from sparring.types import WeightRef

PROMPT = (5, 6, 7)
LENGTH, TOKEN_S, SILENT_S = 12, 1.0, 4.0


def script(request: GenerateRequest) -> list[int]:
    return [100 * request.sampling.seed + at for at in range(LENGTH)]


class Place(ScriptedEngine):
    """A scripted engine with a process that may die or stand still, a token a second.

    Attributes:
        dies_after: number of sampled tokens after which the process dies; 0 is at once.
        stops_after: likewise, after which it stands still.
        start: number of starts of the process; the streams of an earlier one are broken.
    """

    continues = True

    def __init__(self, place: str, **settings: object) -> None:
        super().__init__(script, **settings)  # type: ignore[arg-type]
        self.place, self.node = place, f"the node of {place}"
        self.dead = self.restarted = False
        self.running = asyncio.Event()
        self.running.set()
        self.dies_after: int | None = None
        self.stops_after: int | None = None
        self.start = 0
        self.released: list[str] = []

    def _alive(self) -> None:
        if self.dead:
            raise EngineError(f"{self.place}: connection refused")

    async def ping(self) -> bool:
        await self.running.wait()
        self._alive()
        return not self.restarted

    async def restore(self) -> None:
        await self.ping()
        self.restarted, self._version = False, 0

    async def drop(self, adapter: str) -> None:
        self._alive()

    async def stream(self, request: GenerateRequest) -> AsyncIterator[Delta | Completion]:
        number, start = 0, self.start
        await self.ping()
        async for piece in super().stream(request):
            if start != self.start:
                raise EngineError(f"{self.place}: connection reset")
            await asyncio.sleep(TOKEN_S)
            self.dead |= number == self.dies_after
            if number == self.stops_after:
                self.running.clear()
            await self.ping()
            yield piece
            number += 1

    async def score(self, request: ScoreRequest) -> Scores:
        await self.ping()
        row = (0.0,) * (len(request.tokens) - request.first)
        return Scores(logprobs=row, entropies=row, top_ids=(), top_logprobs=(), version=self.version)

    async def pull(self, ref: WeightRef) -> None:
        await self.ping()
        await super().pull(ref)

    async def release(self, conversation: str) -> None:
        self.released.append(conversation)
        await super().release(conversation)


class Anew(Place):
    """A place whose replies begin anew elsewhere: tokens of its own, and versions only at the end."""

    continues = False

    async def stream(self, request: GenerateRequest) -> AsyncIterator[Delta | Completion]:
        own = hash(self.place) % 97
        async for piece in super().stream(request):
            piece = replace(piece, tokens=tuple(own + token for token in piece.tokens))
            yield piece if isinstance(piece, Completion) else Delta(tokens=piece.tokens, logprobs=piece.logprobs)


def ask(name: str, seed: int = 1, *, prompt: Sequence[int] = PROMPT, talk: str | None = None) -> GenerateRequest:
    sampling = Sampling(seed=seed, max_tokens=LENGTH)
    return GenerateRequest(id=name, tokens=tuple(prompt), sampling=sampling, conversation=talk)


def weights(version: int) -> WeightRef:
    return WeightRef(model="policy", version=version, checksum="", transport="", location=None)


class Kept:
    """A keeper that remembers what it was told, and starts a lost process again if it may."""

    def __init__(self, *, restarts: bool = False) -> None:
        self.lost_ones: list[str] = []
        self.replies: list[str] = []
        self._restarts = restarts

    def lost(self, engine: Place) -> None:
        self.lost_ones.append(engine.place)
        if self._restarts:
            engine.dead, engine.restarted, engine.start = False, True, engine.start + 1

    def replied(self, engine: Place) -> None:
        self.replies.append(engine.place)


def fleet(*places: Place, **settings: object) -> tuple[Fleet, list[str]]:
    """Open a fleet, which is closed behind the test, and a list of what it tells."""
    told: list[str] = []
    opened = Fleet(places, silent_s=SILENT_S, report=partial(heard, told), **settings)  # type: ignore[arg-type]
    OPEN.append(opened)
    return opened, told


OPEN: list[Fleet] = []


def with_fleets(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Make a test of a coroutine on a virtual clock, and close its fleets at the end."""

    @wraps(test)
    async def closing(*arguments: Any, **named: Any) -> None:
        OPEN.clear()
        try:
            await test(*arguments, **named)
        finally:
            while OPEN:
                await OPEN.pop().close()

    return on_virtual_clock(closing)


def heard(told: list[str], text: str, facts: Mapping[str, Any]) -> None:
    """Remember the sentence of an event."""
    told.append(text)


async def alone(request: GenerateRequest) -> Completion:
    return await Place("alone").generate(request)


@pytest.mark.parametrize("stands_still", [False, True])
@pytest.mark.parametrize("after", [*range(LENGTH + 1)])
@with_fleets
async def test_a_turn_goes_on_elsewhere_after_every_token(after: int, stands_still: bool) -> None:
    """The last is behind all tokens, before the completion."""
    one, other = Place("one"), Place("other")
    whole_turn, began = await alone(ask("a")), asyncio.get_running_loop().time()
    if stands_still:
        one.stops_after = after
    else:
        one.dies_after = after
    engines, told = fleet(one, other)
    pieces = [piece async for piece in engines.stream(ask("a"))]
    *deltas, last = pieces
    assert last == whole_turn
    taken_s = asyncio.get_running_loop().time() - began
    assert taken_s <= (LENGTH + 3) * TOKEN_S + (2 * SILENT_S if stands_still else 0)
    whole = joined([delta for delta in deltas if isinstance(delta, Delta)])
    assert (whole.tokens, whole.logprobs, whole.versions) == (last.tokens, last.logprobs, last.versions)
    assert [request.told for request in other.requests] == ([after] if after < LENGTH else [])
    assert engines.metrics["moved"] == 1 and engines.metrics["engines_now"] == 1
    assert len(told) == 1 and told[0].startswith("one is left out")


@with_fleets
async def test_a_turn_outlives_every_engine_but_one() -> None:
    places = [Place(str(number)) for number in range(4)]
    for place in places[:3]:
        place.dies_after = 2
    engines, _ = fleet(*places)
    answers = await asyncio.gather(*(engines.generate(ask(f"r{seed}", seed)) for seed in range(9)))
    assert answers == [await alone(ask(f"r{seed}", seed)) for seed in range(9)]
    places[3].dead = True
    with pytest.raises(EngineError, match="0: .*1: .*2: "):
        await engines.generate(ask("late"))
    with pytest.raises(EngineError, match="none"):
        await engines.pull(weights(1))


@with_fleets
async def test_a_request_that_is_refused_or_fails_alone_takes_no_engine_with_it() -> None:
    class Refusing(Place):
        async def stream(self, request: GenerateRequest) -> AsyncIterator[Delta | Completion]:
            if request.id == "refused":
                raise RequestRefused("never")
            if request.id == "failed":
                raise EngineError("its constraint is broken")
            async for piece in super().stream(request):
                yield piece

    engines, told = fleet(Refusing("one"), Refusing("other"))
    with pytest.raises(RequestRefused, match="never"):
        await engines.generate(ask("refused"))
    with pytest.raises(EngineError, match="its constraint"):
        await engines.generate(ask("failed"))
    assert engines.metrics["engines_now"] == 2 and not told


@with_fleets
async def test_conversations_and_prompts_stay_where_their_cache_is_unless_it_is_full() -> None:
    one, other = Place("one"), Place("other")
    engines, _ = fleet(one, other, room=3)
    group = [ask(f"g{n}", n, talk=f"t{n}") for n in range(3)]
    await asyncio.gather(*map(engines.generate, group), engines.generate(ask("x", prompt=(9,), talk="x")))
    assert [request.id for request in one.requests] == ["g0", "g1", "g2"]
    assert [request.id for request in other.requests] == ["x"]
    later = [ask(f"h{n}", n, prompt=(*PROMPT, n), talk=f"t{n}") for n in range(3)]
    await asyncio.gather(*map(engines.generate, later), engines.generate(ask("g3", 3, talk="t3")))
    assert [request.id for request in one.requests[3:]] == ["h0", "h1", "h2"]
    assert other.requests[-1].id == "g3", "the engine with its prompt is full"
    for name in ("t0", "x", "unknown"):
        await engines.release(name)
    assert (one.released, other.released) == (["t0"], ["x"])


@with_fleets
async def test_an_abort_finds_its_engine() -> None:
    one, other = Place("one"), Place("other")
    engines, _ = fleet(one, other)
    streams = [engines.stream(ask(name, prompt=(number,))) for number, name in enumerate("ab")]
    firsts = [await anext(stream) for stream in streams]
    assert all(isinstance(piece, Delta) for piece in firsts)
    await engines.abort("b")
    rest = [piece async for piece in streams[1]]
    assert isinstance(rest[-1], Completion) and rest[-1].finish_reason == "abort"
    assert [request.id for request in other.requests] == ["b"]
    assert [piece async for piece in streams[0]][-1] == await alone(ask("a", prompt=(0,)))


@with_fleets
async def test_an_aborted_request_of_an_engine_that_stands_still_ends_with_what_was_told() -> None:
    one, other = Place("one"), Place("other")
    one.stops_after = 3
    engines, _ = fleet(one, other)
    answer = asyncio.create_task(engines.generate(ask("a")))
    await asyncio.sleep(5 * TOKEN_S)
    await engines.abort("a")
    assert (await answer).tokens == tuple(script(ask("a"))[:3]) and (await answer).finish_reason == "abort"
    assert not other.requests


@pytest.mark.parametrize("after", [0, 5, LENGTH])
@with_fleets
async def test_a_turn_that_cannot_go_on_begins_again_unless_a_piece_of_it_was_read(after: int) -> None:
    one, other = Anew("one"), Anew("other")
    one.dies_after = after
    engines, _ = fleet(one, other)
    assert await engines.generate(ask("a")) == await Anew("other").generate(ask("a"))
    assert [request.told for request in other.requests] == [0] and engines.metrics["moved"] == 1

    read = list[Delta | Completion]()
    other.dies_after, one.dead, one.dies_after = after, False, None
    await asyncio.sleep(SILENT_S)
    with pytest.raises(EngineError, match="read") if after else nullcontext():
        read += [piece async for piece in engines.stream(ask("b"))]
    assert bool(read) == (not after) and engines.metrics["moved"] == 1 + (not after)


@with_fleets
async def test_an_aborted_turn_that_cannot_go_on_ends_empty() -> None:
    one, other = Anew("one"), Anew("other")
    one.stops_after = 3
    engines, _ = fleet(one, other)
    answer = asyncio.create_task(engines.generate(ask("a")))
    await asyncio.sleep(5 * TOKEN_S)
    await engines.abort("a")
    assert ((await answer).tokens, (await answer).finish_reason) == ((), "abort")
    assert not other.requests


@with_fleets
async def test_scores_are_computed_elsewhere_too() -> None:
    one, other = Place("one"), Place("other", version=0)
    one.running.clear()
    engines, _ = fleet(one, other)
    assert (await engines.score(ScoreRequest(id="s", tokens=PROMPT))).version == 0


@with_fleets
async def test_an_update_is_of_all_engines_that_get_requests() -> None:
    places = [Place("one"), Place("other", refuse_on=(2,)), Place("third")]
    engines, told = fleet(*places)
    await engines.pull(weights(1))
    assert engines.version == 1 and [place.version for place in places] == [1, 1, 1]
    await engines.pull(weights(2))
    assert engines.version == 2 and [place.version for place in places] == [2, 1, 2]
    answers = await asyncio.gather(*(engines.generate(ask(f"{n}", n, prompt=(n,))) for n in range(6)))
    assert {answer.versions.values for answer in answers} == {(2,)} and "other is left out" in told[0]
    await asyncio.sleep(SILENT_S)
    assert engines.metrics["engines_now"] == 3 and places[1].version == 2
    await engines.pull(weights(3))
    assert engines.metrics["engines_now"] == 3 and [place.version for place in places] == [3, 3, 3]
    assert "other serves version 2" in told[1]


@with_fleets
async def test_an_update_that_every_engine_refuses_leaves_the_fleet_as_it_was() -> None:
    places = [Place("one", refuse_on=(1,)), Place("other", refuse_on=(1,))]
    engines, told = fleet(*places)
    with pytest.raises(WeightsError):
        await engines.pull(weights(1))
    assert engines.metrics["engines_now"] == 2 and not told and engines.version == 0
    await engines.pull(weights(1))
    assert engines.version == 1


@with_fleets
async def test_an_update_does_not_wait_for_an_engine_that_stands_still() -> None:
    one, other = Place("one"), Place("other")
    engines, told = fleet(one, other)
    one.running.clear()
    began = asyncio.get_running_loop().time()
    await engines.pull(weights(1))
    assert asyncio.get_running_loop().time() - began <= 2 * SILENT_S
    assert engines.version == other.version == 1 and "one is left out" in told[0]
    one.running.set()
    await asyncio.sleep(2 * SILENT_S)
    assert one.version == 1 and engines.metrics["engines_now"] == 2


def test_an_engine_that_stood_still_comes_back_when_it_has_caught_up() -> None:
    async def main() -> None:
        one, other = Place("one"), Place("other")
        one.stops_after = 1
        engines, told = fleet(one, other)
        await engines.generate(ask("a"))
        await engines.pull(weights(1))  # does not wait for the one that stands still
        assert engines.version == 1 and one.version == 0
        one.stops_after = None
        one.running.set()
        await engines.generate(ask("b", prompt=(1,)))
        assert one.version == 1 and engines.metrics["engines_now"] == 2
        assert [sentence.partition(" ")[0] for sentence in told] == ["one", "one"]
        await engines.close()

    _, seconds = run_virtual(main())
    assert seconds < 100 * TOKEN_S


@with_fleets
async def test_an_engine_that_stood_still_between_updates_comes_back_too() -> None:
    one, other = Place("one"), Place("other")
    one.stops_after = 1
    engines, told = fleet(one, other)
    await engines.generate(ask("a"))
    one.stops_after = None
    one.running.set()
    await asyncio.sleep(3 * SILENT_S)
    assert engines.metrics["engines_now"] == 2 and len(told) == 2


@with_fleets
async def test_a_restarted_engine_gets_the_first_weights_and_then_the_newest() -> None:
    one, other = Place("one", refuse_on=()), Place("other")
    engines, _ = fleet(one, other)
    await engines.pull(weights(1))
    for version in (1, 2):
        one.restarted, one._version = True, 7
        await engines.generate(ask(f"r{version}", prompt=(version,)))
        await asyncio.sleep(2 * SILENT_S)
        assert one.version == version and engines.metrics["engines_now"] == 2 and engines.version == version
        await engines.pull(weights(2))
    assert [ref.version for ref in one.pulled] == [1, 1, 2, 2, 2]


@with_fleets
async def test_a_reader_that_pauses_while_its_engine_is_restarted_reads_on() -> None:
    one, other = Place("one"), Place("other")
    engines, told = fleet(one, other)
    stream = engines.stream(ask("a"))
    pieces = [await anext(stream)]
    one.dead, one.start = True, 1
    await engines.pull(weights(0))
    one.dead = False
    await asyncio.sleep(3 * SILENT_S)
    assert len(told) == 2 and engines.metrics["engines_now"] == 2
    pieces += [piece async for piece in stream]
    assert pieces[-1] == await alone(ask("a")) and engines.metrics["moved"] == 1


@with_fleets
async def test_an_engine_that_answers_catches_up_as_it_is() -> None:
    """Only one that does not answer is replaced."""
    one, other, kept = Place("one", refuse_on=(1,)), Place("other"), Kept()
    engines, _ = fleet(one, other, keeper=kept)
    await engines.pull(weights(1))
    assert engines.metrics["engines_now"] == 1
    await asyncio.sleep(SILENT_S)
    assert one.version == 1 and engines.metrics["engines_now"] == 2 and not kept.lost_ones
    one.running.clear()
    await engines.pull(weights(2))
    await asyncio.sleep(4 * SILENT_S)
    assert len(kept.lost_ones) > 1 and set(kept.lost_ones) == {"one"}, "as long as it does not answer"


@with_fleets
async def test_an_engine_that_never_takes_an_update_is_replaced_after_some_tries() -> None:
    one, other, kept = Place("one", refuse_on=range(1, 2 + CATCH_UPS)), Place("other"), Kept(restarts=True)
    engines, told = fleet(one, other, keeper=kept)
    await engines.pull(weights(1))
    await asyncio.sleep(CATCH_UPS * SILENT_S)
    assert kept.lost_ones == ["one"] and "does not catch up" in told[1]
    await asyncio.sleep(SILENT_S)
    assert one.version == 1 and engines.metrics["engines_now"] == 2 and kept.lost_ones == ["one"]


@with_fleets
async def test_the_first_reply_of_each_life_is_told() -> None:
    one, kept = Place("one"), Kept(restarts=True)
    engines, _ = fleet(one, keeper=kept)
    for life in (1, 2):
        for _ in range(2):
            await engines.generate(ask("a"))
        assert kept.replies == ["one"] * life
        one.dead = True


@pytest.mark.parametrize("after", [0, 5, LENGTH])
@with_fleets
async def test_what_is_asked_waits_for_the_only_engine_if_somebody_starts_it_again(after: int) -> None:
    """The turn goes on from the tokens that were told. Where nobody does, requests fail."""
    one, kept = Place("one"), Kept(restarts=True)
    engines, told = fleet(one, keeper=kept)
    await engines.pull(weights(1))
    one.dies_after = after
    turn = asyncio.create_task(engines.generate(ask("a")))
    while not kept.lost_ones:
        await asyncio.sleep(TOKEN_S)
    one.dies_after = None
    later = [engines.pull(weights(2)), engines.score(ScoreRequest(id="s", tokens=PROMPT))]
    _, scores = await asyncio.gather(*later)
    assert scores is not None and scores.version >= 1 and engines.version == one.version == 2
    answer = await turn
    assert answer.tokens == (await alone(ask("a"))).tokens and set(answer.versions.values) <= {1, 2}
    assert len(told) == 2 and kept.replies[-1] == "one"
    one.dead = True
    waiting = asyncio.create_task(Fleet([one], silent_s=SILENT_S, keeper=Kept()).generate(ask("b")))
    await asyncio.sleep(100 * SILENT_S)
    assert not waiting.done()
    waiting.cancel()


@with_fleets
async def test_a_fleet_that_is_closed_lets_nobody_wait() -> None:
    one = Place("one")
    one.dead = True
    engines, _ = fleet(one, keeper=Kept())
    waiting = asyncio.create_task(engines.generate(ask("a")))
    await asyncio.sleep(SILENT_S)
    await engines.close()
    with pytest.raises(EngineError, match="closed"):
        await waiting


@with_fleets
async def test_an_engine_that_comes_late_joins_with_the_newest_weights() -> None:
    one, late = Place("one"), Place("late")
    late.dead, late.restarted = True, True
    told: list[str] = []
    engines = Fleet([one], absent=[late], silent_s=SILENT_S, report=partial(heard, told))
    assert engines.engines == (one, late)
    await engines.generate(ask("a"))
    await engines.pull(weights(1))
    assert engines.metrics["engines_now"] == 1 and engines.version == 1
    late.dead = False
    await asyncio.sleep(2 * SILENT_S)
    assert engines.metrics["engines_now"] == 2 and late.version == 1 and [ref.version for ref in late.pulled] == [1]
    answers = await asyncio.gather(*(engines.generate(ask(str(n), n, prompt=(n,))) for n in range(2)))
    assert late.requests and {answer.versions.values for answer in answers} == {(1,)}


@with_fleets
async def test_a_caller_that_leaves_drops_its_request() -> None:
    one = Place("one")
    engines, _ = fleet(one)
    task = asyncio.create_task(engines.generate(ask("a")))
    await asyncio.sleep(3 * TOKEN_S)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await engines.generate(replace(ask("b"), prompt_logprobs=False))) == await alone(ask("b"))
    await engines.close()
    with pytest.raises(EngineError, match="closed"):
        await engines.generate(ask("c"))


def test_what_happens_to_engines_is_told_by_number_node_and_reason() -> None:
    async def main() -> list[Mapping[str, Any]]:
        one, other, facts = Place("one", refuse_on=(2,)), Place("other"), list[Mapping[str, Any]]()
        engines = Fleet([one, other], silent_s=SILENT_S, report=lambda text, about: facts.append(about))
        await engines.pull(weights(1))
        running = [asyncio.create_task(engines.generate(ask(f"{n}", n, prompt=(n,)))) for n in range(4)]
        await asyncio.sleep(1.5 * TOKEN_S)
        at_work = engines.metrics
        assert [at_work[f"{number}/requests_now"] for number in range(2)] == [2.0, 2.0]
        other.dead = True
        await asyncio.gather(*running)
        other.dead = False
        await asyncio.sleep(2 * SILENT_S)
        await engines.pull(weights(2))
        await engines.close()
        return facts

    facts, _ = run_virtual(main())
    lost = {"kind": "engine lost", "engine": 1, "node": "the node of other", "at_step": 1, "moved": 2}
    assert {**facts[0], "reason": ""} == {**lost, "reason": ""} and "connection refused" in facts[0]["reason"]
    assert [(of["kind"], of["engine"], of["at_step"]) for of in facts[1:]] == [
        ("engine back", 1, 1),
        ("engine lost", 0, 2),
    ]


class Counting(Place):
    """A place that counts its replies, as a client of a server does."""

    @property
    def metrics(self) -> dict[str, float]:
        return {**super().metrics, "completions": float(len(self.requests))}


@pytest.mark.parametrize("count", [1, 2])
def test_figures_are_by_engine_where_there_are_several(count: int) -> None:
    async def main() -> dict[str, float]:
        engines, _ = fleet(*(Counting(f"{number}") for number in range(count)))
        await asyncio.gather(*(engines.generate(ask(f"{n}", n, prompt=(n,))) for n in range(4)))
        await engines.close()
        return {name: value for name, value in engines.metrics.items() if "/" in name}

    names = {"completions": 2.0, "tokens": 2.0 * LENGTH, "requests_now": 0.0}
    expected = {f"{number}/{name}": value for number in range(count) for name, value in names.items()}
    assert run_virtual(main())[0] == (expected if count > 1 else {})
