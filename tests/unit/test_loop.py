import asyncio
import gc

from sparring.loop import run_loop
from sparring.rollout.window import Window


def test_the_garbage_collector_is_as_before_when_the_loop_ends() -> None:
    before, during = gc.get_threshold(), []

    async def batches():
        during.append((gc.get_threshold()[0] > before[0], gc.get_freeze_count() > 0))
        return
        yield

    async def nothing(*_: object) -> None:
        pass

    asyncio.run(run_loop(batches(), {}, {}, Window(1, 0), nothing))
    assert during == [(True, True)]
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0
