"""How many rollouts are in flight: as many as the engine bears, on a virtual clock and the real plan of its steps."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loaded_engine import LoadedEngine
from talk import Training, sampled, words

from sparring.rollout.load import Limiter, Places
from sparring.testing.clock import run_virtual
from sparring.types import Group

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
    groups, fixed_s = sampled(fixed, 40)
    same, followed_s = sampled(followed, 40)
    assert followed_s < 0.75 * fixed_s
    assert followed.engine.metrics["prefill_tokens"] < 0.6 * fixed.engine.metrics["prefill_tokens"]
    assert FITS <= followed.scheduler.places.limit < 2 * FITS
    assert followed.scheduler.metrics()["rollout/places"] < 2 * FITS
    assert [group.index for group in same] == list(range(40)), "the order of groups"
    assert tokens(same) == tokens(groups), "what is sampled does not depend on when it began"


def test_an_ample_cache_costs_nothing() -> None:
    fixed, followed = (Training(engine(4000), most=64, follows=follows) for follows in (False, True))
    assert sampled(followed, 20)[1] == sampled(fixed, 20)[1]
    assert followed.scheduler.places.limit == 64


class Report:
    """What an engine reports, moved by hand."""

    def __init__(self) -> None:
        names = "preemptions kv_evictions kv_hits kv_misses prefill_tokens generated_tokens waiting_now"
        self.counts = dict.fromkeys(names.split(), 0.0)

    def __call__(self) -> dict[str, float]:
        return dict(self.counts)

    def turns(self, requests: int, lost: int = 0, *, read: float = 100.0, waiting: int = 0) -> None:
        """So many requests, of which some lost their cache."""
        self.counts["kv_hits"] += requests
        self.counts["kv_evictions"] += lost
        self.counts["prefill_tokens"] += read * requests
        self.counts["generated_tokens"] += 100 * requests
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


def test_an_overload_cuts_once_until_the_cut_has_taken_effect() -> None:
    async def main() -> None:
        report = Report()
        places = Places(100, report)
        await rollouts(places, 1, lambda: report.turns(100, lost=31))
        assert (places.limit, places.in_use) == (85, 99)
        await rollouts(places, 13, lambda: report.turns(100, lost=90))
        assert (places.limit, places.in_use) == (85, 86), "what they lost is the load from before"
        await rollouts(places, 2, lambda: report.turns(100, lost=31))
        assert places.limit == 72

    run_virtual(main())


@pytest.mark.parametrize(
    "bears",
    [
        {"lost": 30},
        {"lost": 90, "read": 40.0},  # what was lost is found again, or costs little
    ],
)
def test_what_costs_little_is_no_overload(bears: dict[str, float]) -> None:
    async def main() -> int:
        report = Report()
        places = Places(100, report)
        await rollouts(places, 10, lambda: report.turns(100, **bears))
        return places.limit

    assert run_virtual(main())[0] == 100


def test_they_come_back_and_not_while_requests_wait() -> None:
    async def main() -> None:
        report = Report()
        places = Places(40, report)
        await rollouts(places, 60, lambda: report.turns(100, lost=90))
        low = places.limit
        assert low < 20
        await rollouts(places, 30, lambda: report.turns(100, waiting=1))
        assert places.limit == low
        await rollouts(places, 100, lambda: report.turns(100))
        assert places.limit == 40 == places.in_use

    run_virtual(main())


def test_an_engine_that_reports_nothing_leaves_the_bound() -> None:
    async def main() -> None:
        places = Places(7, lambda: {"generated_tokens": 5.0})
        await rollouts(places, 50)
        assert places.limit == 7 == places.in_use

    run_virtual(main())


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 40), st.lists(st.tuples(st.integers(-500, 500), st.integers(-50, 500)), max_size=80))
def test_there_is_always_a_place_and_never_more_than_the_bound(most: int, turns: list[tuple[int, int]]) -> None:
    """Whatever an engine says, one that was started anew and counts from nothing included."""

    async def main() -> None:
        report = Report()
        places = Places(most, report)
        for requests, lost in turns:
            await rollouts(places, 1, lambda requests=requests, lost=lost: report.turns(requests, lost))
            assert 1 <= places.limit <= most and 1 <= places.in_use <= most

    run_virtual(main())


def test_a_limiter_lets_in_as_many_as_it_says_now() -> None:
    limit = 1

    async def main() -> None:
        nonlocal limit
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

    run_virtual(main())
