"""A fleet sleeps and wakes as one engine, also when some of its engines are lost meanwhile."""

from __future__ import annotations

import asyncio

import pytest
from test_fleet import LENGTH, SILENT_S, TOKEN_S, Kept, Place, alone, ask, fleet, weights, with_fleets

from sparring.errors import EngineError, WeightsError
from sparring.types import WeightRef


class Sleeper(Place):
    """A place whose process sleeps; a new process is awake."""

    async def sleep(self) -> None:
        await self.ping()
        await super().sleep()

    async def wake(self, ref: WeightRef) -> None:
        await self.ping()
        await super().wake(ref)

    async def restore(self) -> None:
        await super().restore()
        self.asleep = False


@with_fleets
async def test_a_turn_of_an_engine_that_dies_in_its_sleep_goes_on_elsewhere() -> None:
    one, other = Sleeper("one"), Sleeper("other")
    engines, told = fleet(one, other)
    answer = asyncio.create_task(engines.generate(ask("a")))
    await asyncio.sleep(3.5 * TOKEN_S)
    await engines.sleep()
    await engines.sleep()
    one.dead = True
    await asyncio.sleep(3 * SILENT_S)
    assert not answer.done() and "one is left out" in told[0]
    await engines.wake(weights(1))
    whole = await answer
    assert whole.tokens == (await alone(ask("a"))).tokens and len(whole.tokens) == LENGTH
    assert engines.version == 1 and engines.metrics["engines_now"] == 1
    one.dead = False
    await asyncio.sleep(2 * SILENT_S)
    assert engines.metrics["engines_now"] == 2 and one.version == 1 and not one.asleep


@with_fleets
async def test_if_all_die_in_their_sleep_the_new_ones_wake() -> None:
    one, other = Sleeper("one"), Sleeper("other")
    engines, _ = fleet(one, other, keeper=Kept(restarts=True))
    answer = asyncio.create_task(engines.generate(ask("a")))
    await asyncio.sleep(3.5 * TOKEN_S)
    await engines.sleep()
    one.dead = other.dead = True
    await asyncio.sleep(3 * SILENT_S)
    assert engines.metrics["engines_now"] == 0  # they are started, and stay out
    await engines.wake(weights(1))
    assert engines.version == 1
    assert len((await answer).tokens) == LENGTH


@with_fleets
async def test_without_a_keeper_it_does_not_wake_if_all_are_dead() -> None:
    engines, _ = fleet(one := Sleeper("one"))
    await engines.sleep()
    one.dead = True
    with pytest.raises(EngineError, match="connection refused"):
        await engines.wake(weights(1))
    await asyncio.sleep(2 * SILENT_S)
    one.dead = False
    await engines.wake(weights(1))
    assert one.version == 1 and not one.asleep


@with_fleets
async def test_an_engine_that_comes_back_meanwhile_is_told_to_sleep() -> None:
    one, other = Sleeper("one"), Sleeper("other")
    engines, _ = fleet(one, other)
    answers = [asyncio.create_task(engines.generate(ask(name))) for name in "ab"]
    await asyncio.sleep(TOKEN_S / 2)
    one.running.clear()
    await asyncio.sleep(3 * SILENT_S)  # it is lost
    assert engines.metrics["engines_now"] == 1
    await engines.sleep()
    one.running.set()
    await asyncio.sleep(2 * SILENT_S)
    assert one.asleep and engines.metrics["engines_now"] == 1
    with pytest.raises(WeightsError, match="awake"):
        await engines.pull(weights(1))
    await engines.wake(weights(1))
    await asyncio.gather(*answers)
    await asyncio.sleep(2 * SILENT_S)
    assert not one.asleep and engines.metrics["engines_now"] == 2 and {one.version, other.version} == {1}


@with_fleets
async def test_a_fleet_with_an_engine_that_cannot_sleep_stays_awake() -> None:
    class Awake(Sleeper):
        async def sleep(self) -> None:
            raise EngineError(f"{self.place}: expected an engine that can sleep")

    one, other = Awake("one"), Sleeper("other")
    engines, _ = fleet(one, other)
    with pytest.raises(EngineError, match="can sleep"):
        await engines.sleep()
    await engines.pull(weights(1))
    assert engines.version == 1 and engines.metrics["engines_now"] == 2 and not other.asleep


@pytest.mark.parametrize("restarts", [False, True])
@with_fleets
async def test_engines_that_are_dead_when_they_are_to_sleep_have_nothing_to_give_back(restarts: bool) -> None:
    places = [Sleeper("one"), Sleeper("other")]
    engines, _ = fleet(*places, keeper=Kept(restarts=restarts))
    for place in places[: 1 + restarts]:
        place.dead = True
    await engines.sleep()
    await asyncio.sleep(3 * SILENT_S)
    await engines.wake(weights(1))
    assert engines.version == 1 and (await engines.generate(ask("a"))).tokens


@with_fleets
async def test_a_fleet_that_is_closed_in_its_sleep_fails_what_waits() -> None:
    engines, _ = fleet(Sleeper("one"))
    answer = asyncio.create_task(engines.generate(ask("a")))
    await asyncio.sleep(TOKEN_S)
    await engines.sleep()
    await engines.close()
    with pytest.raises(EngineError):
        await answer
