"""What is asked of a fleet while an engine is lost: aborts, releases and updates at the worst moment."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from test_fleet import LENGTH, SILENT_S, TOKEN_S, Kept, Place, alone, ask, fleet, weights, with_fleets

from sparring.engine.fleet import PROMPTS
from sparring.engine.turn_pieces import joined
from sparring.errors import EngineError
from sparring.generation import Completion, Delta, GenerateRequest
from sparring.types import WeightRef


async def pieces_of(stream: AsyncIterator[Delta | Completion]) -> list[Any]:
    return [piece async for piece in stream]


@with_fleets
async def test_an_abort_of_a_request_that_is_between_two_engines_ends_it() -> None:
    """Its connection is broken, and nobody knows yet whether its engine is lost."""

    class Unplugged(Place):
        async def stream(self, request: GenerateRequest) -> AsyncIterator[Delta | Completion]:
            yield await anext(super().stream(request))
            self.running.clear()
            raise EngineError("connection reset")

    other = Place("other")
    engines, told = fleet(Unplugged("one"), other)
    answer = asyncio.create_task(engines.generate(ask("a")))
    await asyncio.sleep(TOKEN_S + SILENT_S / 2)
    assert not told
    await engines.abort("a")
    assert (await answer).finish_reason == "abort" and len((await answer).tokens) == 1 and not other.requests


@with_fleets
async def test_a_turn_that_ended_before_its_abort_keeps_its_end() -> None:
    one = Place("one")
    one.stops_after = LENGTH  # all tokens are told, and not that they are all
    engines, _ = fleet(one, Place("other"))
    answer = asyncio.create_task(engines.generate(ask("a")))
    await asyncio.sleep((LENGTH + 2) * TOKEN_S)
    await engines.abort("a")
    assert await answer == await alone(ask("a"))


@pytest.mark.parametrize("asked", ["release", "drop"])
@with_fleets
async def test_nobody_waits_longer_than_a_ping_for_an_engine_that_stands_still(asked: str) -> None:
    class Still(Place):
        async def release(self, conversation: str) -> None:
            await self.running.wait()

        async def drop(self, adapter: str) -> None:
            await self.running.wait()

    one = Still("one")
    engines, _ = fleet(one, Place("other"))
    stream = engines.stream(ask("a", talk="t"))
    await anext(stream)
    one.running.clear()
    async with asyncio.timeout(3 * SILENT_S):
        await getattr(engines, asked)("t")
    await stream.aclose()  # type: ignore[attr-defined]


@with_fleets
async def test_the_versions_of_a_turn_rise_where_its_engine_dies_during_an_update() -> None:
    """The first has committed the update, and sampled with it, when it dies; the other one is slower."""

    class Slow(Place):
        async def pull(self, ref: WeightRef) -> None:
            await asyncio.sleep(6 * TOKEN_S)
            await super().pull(ref)

    one, other = Place("one"), Slow("other")
    one.dies_after = 3
    engines, _ = fleet(one, other)
    answer = asyncio.create_task(pieces_of(engines.stream(ask("a"))))
    await asyncio.sleep(1.5 * TOKEN_S)
    await engines.pull(weights(1))
    *deltas, _ = await answer
    assert joined(deltas).versions.expand() == [0] * 2 + [1] * (LENGTH - 2)


@with_fleets
async def test_a_fleet_forgets_the_prompts_that_came_the_longest_ago() -> None:
    engines, _ = fleet(Place("one"))
    for number in range(PROMPTS + 10):
        one = ask("a", prompt=(number,))
        await engines.generate(replace(one, sampling=replace(one.sampling, max_tokens=1)))
    assert len(engines._prompts) == PROMPTS


@with_fleets
async def test_a_closed_fleet_watches_nobody_and_loses_no_engine() -> None:
    """Its requests fail, and their callers may still look after their engines."""

    class Closing(Place):
        async def stream(self, request: GenerateRequest) -> AsyncIterator[Delta | Completion]:
            async for piece in super().stream(request):
                self._alive()
                yield piece

        async def close(self) -> None:
            self.dead = True

    kept = Kept()
    engines, told = fleet(Closing("one"), Closing("other"), keeper=kept)
    answer = asyncio.create_task(engines.generate(ask("a")))
    await asyncio.sleep(2.5 * TOKEN_S)
    await engines.close()
    with pytest.raises(EngineError):
        await answer
    assert not told and not kept.lost_ones and not any("Fleet._watch" in repr(task) for task in asyncio.all_tasks())
