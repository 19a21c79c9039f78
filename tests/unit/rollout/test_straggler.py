"""The time that the last rollout of an awaited group takes, on a virtual clock."""

from __future__ import annotations

import asyncio

import pytest
from fates import Fates, make_stack

from sparring.observe.spans import Spans
from sparring.rollout.scheduler import Scheduler
from sparring.rollout.window import Window
from sparring.testing.clock import run_virtual
from sparring.testing.toy import ToyWorld


@pytest.mark.parametrize(("size", "straggling_s"), [(4, 50.0), (1, 0.0)])
def test_a_group_that_lacks_one_rollout_counts_as_straggling(size: int, straggling_s: float) -> None:
    """The first step of the world takes 53 s, the others 3 s; a rollout has two steps and two turns of 1 s."""
    stack = make_stack(Fates(step=lambda number: 53.0 if number == 0 else 3.0), group_size=size)

    async def main() -> dict[frozenset[str], float]:
        stack.runner.waits.spans = spans = Spans(asyncio.get_running_loop().time)
        source = ToyWorld().tasks("train", 1)
        scheduler = Scheduler(stack.runner, source, Window(2, 0, 1), run_seed=1, engine_version=lambda: 0)
        async for _ in scheduler.groups():
            pass
        await asyncio.sleep(10)
        return spans.lap()

    seconds, _ = run_virtual(main())
    straggles = sum(lasted for together, lasted in seconds.items() if "straggling" in together)
    worlds = sum(lasted for together, lasted in seconds.items() if "worlds" in together)
    assert straggles == pytest.approx(straggling_s) and worlds == pytest.approx(56.0, abs=1.0)
