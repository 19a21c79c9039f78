import asyncio

from sparring.loop import run_loop
from sparring.rollout.window import Window


def test_rollouts_are_closed_when_the_batches_end() -> None:
    log = []

    async def rollouts():
        try:
            yield 1
            yield 2
        finally:
            log.append("closed")

    async def batches(groups):
        async for group in groups:
            log.append(group)
            return
        yield

    async def nothing(*_: object) -> None:
        pass

    asyncio.run(run_loop(rollouts(), batches, {}, {}, Window(1, 0), nothing))
    assert log == [1, "closed"]
