"""How many rollouts are in flight: as many as the engine bears, on a virtual clock and the real plan of its steps."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from loaded_engine import LoadedEngine
from talk import Training, sampled, words
from virtual import on_virtual_clock

from sparring.rollout.load import Limiter, Places
from sparring.testing.clock import run_virtual
from sparring.types import Group, WeightRef

FITS = 8
"""Conversations of `talk` that the small cache holds."""


def engine(pages: int = 20 * FITS) -> LoadedEngine:
    """An engine for which reading is dear, as it is for long conversations."""
    return LoadedEngine(words, pages=pages, prefill_s=0.003)


def tokens(groups: list[Group]) -> list[list[tuple[int, ...]]]:
    """Everything that was said."""
    return [[s.tokens for r in g.rollouts for t in r.trajectories for s in t.segments] for g in groups]


def test_a_cache_for_a_quarter_of_the_rollouts_is_not_overrun() -> None:
    fixed, followed = (Training(engine(), most=4 * FITS, follows=follows) for follows in (False, True))
    groups, fixed_s = sampled(fixed, 24)
    same, followed_s = sampled(followed, 24)
    assert followed_s < 0.75 * fixed_s
    assert followed.engine.metrics["prefill_tokens"] < 0.7 * fixed.engine.metrics["prefill_tokens"]
    assert FITS <= followed.scheduler.places.limit < 2 * FITS
    assert followed.scheduler.metrics()["rollout/places"] < 2 * FITS
    assert [group.index for group in same] == list(range(24)), "the order of groups"
    assert tokens(same) == tokens(groups), "what is sampled does not depend on when it began"


def test_an_ample_cache_costs_nothing() -> None:
    fixed, followed = (Training(engine(4000), most=32, follows=follows) for follows in (False, True))
    assert sampled(followed, 12)[1] == sampled(fixed, 12)[1]
    assert followed.scheduler.places.limit == 32


class Report:
    """What an engine reports, moved by hand."""

    def __init__(self) -> None:
        names = "kv_lost_tokens kv_hits kv_misses prefill_tokens generated_tokens waiting_now"
        self.counts = dict.fromkeys(names.split(), 0.0)

    def __call__(self) -> dict[str, float]:
        return dict(self.counts)

    def turns(self, requests: int, lost: int = 0, *, waiting: int = 0) -> None:
        """So many requests; of the tokens that they compute so many in a hundred were computed before."""
        self.counts["kv_hits"] += requests
        self.counts["kv_lost_tokens"] += lost * requests
        self.counts["prefill_tokens"] += 70 * requests
        self.counts["generated_tokens"] += 30 * requests
        self.counts["waiting_now"] = waiting


async def rollouts(places: Places, count: int, turn: object = None) -> None:
    """All places are taken, then so many rollouts end, each followed by another where there is a place."""
    while places.in_use < places.limit:
        await places.acquire()
    for _ in range(count):
        if callable(turn):
            turn()
        places.release()
        while places.in_use < places.limit:
            await places.acquire()


@on_virtual_clock
async def test_an_overload_cuts_once_until_the_cut_has_taken_effect() -> None:
    report = Report()
    places = Places(100, report)
    await rollouts(places, 1, lambda: report.turns(100, lost=31))
    assert (places.limit, places.in_use) == (85, 99)
    await rollouts(places, 13, lambda: report.turns(100, lost=90))
    assert (places.limit, places.in_use) == (85, 86), "what they lost is the load from before"
    await rollouts(places, 2, lambda: report.turns(100, lost=31))
    assert places.limit == 72


def test_what_costs_little_is_no_overload() -> None:
    async def main() -> int:
        report = Report()
        places = Places(100, report)
        await rollouts(places, 10, lambda: report.turns(100, lost=25))
        return places.limit

    assert run_virtual(main())[0] == 100


@on_virtual_clock
async def test_they_come_back_and_not_while_requests_wait() -> None:
    report = Report()
    places = Places(40, report)
    await rollouts(places, 60, lambda: report.turns(100, lost=90))
    low = places.limit
    assert low < 20
    await rollouts(places, 30, lambda: report.turns(100, waiting=1))
    assert places.limit == low
    await rollouts(places, 100, lambda: report.turns(100))
    assert places.limit == 40 == places.in_use


@on_virtual_clock
async def test_an_engine_that_reports_nothing_leaves_the_bound() -> None:
    places = Places(7, lambda: {"generated_tokens": 5.0, "preemptions": 99.0})
    await rollouts(places, 50)
    assert places.limit == 7 == places.in_use


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 40), st.lists(st.tuples(st.integers(-500, 500), st.integers(-50, 500)), max_size=80))
@on_virtual_clock
async def test_there_is_always_a_place_and_never_more_than_the_bound(most: int, turns: list[tuple[int, int]]) -> None:
    """Whatever an engine says, one that was started anew and counts from nothing included."""
    report = Report()
    places = Places(most, report)
    for requests, lost in turns:
        await rollouts(places, 1, lambda requests=requests, lost=lost: report.turns(requests, lost))
        assert 1 <= places.limit <= most and 1 <= places.in_use <= most


@on_virtual_clock
async def test_a_limiter_lets_in_as_many_as_it_says_now() -> None:
    limit = 1
    limiter = Limiter(lambda: limit)
    await limiter.acquire()
    limit = 2
    await limiter.acquire()
    assert limiter.in_use == 2
    limiter.release()
    await limiter.acquire()
    limiter.release()
    limiter.release()
    assert limiter.in_use == 0


def test_order_and_lag_stay_where_the_cache_holds_two_conversations() -> None:
    """Six steps of an asynchronous run whose places go down to a few."""
    max_lag = 2
    training = Training(engine(pages=40), most=16, follows=True, groups=3, max_lag=max_lag, steps=6)
    limits: list[int] = []

    async def main() -> list[Group]:
        groups: list[Group] = []
        async for group in training.scheduler.groups():
            groups.append(group)
            limits.append(training.scheduler.places.limit)
            assert 0 <= group.index // 3 - group.version <= max_lag
            if len(groups) % 3 == 0:
                step = len(groups) // 3
                await training.engine.pull(
                    WeightRef(model="policy", version=step, checksum="", transport="", location=None)
                )
                training.window.release(step)
        return groups

    groups, _ = run_virtual(main())
    assert [group.index for group in groups] == list(range(18)) and not any(group.failed for group in groups)
    assert min(limits) <= 3
