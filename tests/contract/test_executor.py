"""The contract of `Executor`, for every implementation, and what a thread of its own adds to it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from typing import Any, Protocol

import pytest

from sparring.envs.box_at_home import BoxAtHome
from sparring.envs.executor import EXECUTOR, Executor, InlineExecutor, at_home, away, cooperative
from sparring.envs.threads import LoopThreads
from sparring.types import BoxSpec

NAME: ContextVar[str] = ContextVar("name", default="nobody")
GRACE_S = 60.0
"""Seconds that code has that ends: more than a busy machine needs."""
NO_GRACE_S = 0.05
"""Seconds that code has that never ends."""
EXECUTORS: dict[str, Callable[[float], Executor]] = {
    "inline": lambda grace_s: InlineExecutor(grace_s=grace_s),
    "thread": lambda grace_s: LoopThreads(grace_s).executor(),
    "shared thread": lambda grace_s: LoopThreads(grace_s).executor(shared=True),
}


class Make(Protocol):
    """Makes an executor."""

    def __call__(self, grace_s: float = GRACE_S) -> Executor: ...


@pytest.fixture(params=EXECUTORS)
def make(request: pytest.FixtureRequest) -> Make:
    """Makes one."""

    def made(grace_s: float = GRACE_S) -> Executor:
        return EXECUTORS[request.param](grace_s)

    return made


def plain(a: int, *, b: int = 0) -> int:
    """A plain function."""
    return a + b


async def awaiting(a: int, *, b: int = 0) -> int:
    """A coroutine function."""
    await asyncio.sleep(0)
    return a + b


def run(main: Coroutine[Any, Any, Any]) -> Any:
    """On an event loop."""
    return asyncio.run(main)


async def cancelled(executor: Executor, function: Callable[..., Any], begun: threading.Event) -> None:
    """Begin a call and cancel it once its code runs."""
    call = asyncio.get_running_loop().create_task(executor.run(function))
    assert await asyncio.to_thread(begun.wait, GRACE_S)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call


def test_functions_and_coroutine_functions_return(make: Make) -> None:
    async def main() -> list[int]:
        executor = make()
        answers = [
            await executor.run(function, 1, b=2) for function in (plain, awaiting, lambda a, b: awaiting(a, b=b))
        ]
        answers += await asyncio.gather(*[executor.run(awaiting, n) for n in range(3)])
        answers.append(await executor.finish(lambda: plain(4)))
        executor.close()
        executor.close()
        return answers

    assert run(main()) == [3, 3, 3, 0, 1, 2, 4]


@pytest.mark.parametrize(
    ("error", "arrives"),
    [
        *((error, type(error)) for error in (KeyError("k"), asyncio.CancelledError(), TimeoutError("t"))),
        # what would end more than the call is an error of the call
        *((error, RuntimeError) for error in (SystemExit(1), KeyboardInterrupt(), StopIteration(5))),
    ],
)
def test_what_is_raised_arrives(make: Make, error: BaseException, arrives: type[BaseException]) -> None:
    def plainly() -> None:
        raise error

    async def awaited() -> None:
        await asyncio.sleep(0)
        raise error

    async def main() -> None:
        executor = make()
        for function in (plainly, awaited):
            with pytest.raises(arrives):
                await executor.run(function)
        assert await executor.run(plain, 1) == 1 and not executor.abandoned

    run(main())


def test_cancelling_ends_the_call(make: Make) -> None:
    begun, ended = threading.Event(), threading.Event()

    async def long() -> None:
        try:
            begun.set()
            await asyncio.sleep(1e6)
        finally:
            ended.set()

    async def main() -> None:
        executor = make()
        await cancelled(executor, long, begun)
        assert ended.is_set() and not executor.abandoned
        assert await executor.run(plain, 1) == 1

    run(main())


def test_code_that_ignores_cancellation_is_abandoned(make: Make) -> None:
    begun, go_on = threading.Event(), threading.Event()

    async def deaf() -> None:
        begun.set()
        while not go_on.is_set():
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                pass

    async def main() -> None:
        executor = make(NO_GRACE_S)
        await cancelled(executor, deaf, begun)
        assert executor.abandoned
        with pytest.raises(RuntimeError, match="an earlier call never ended"):
            await executor.run(plain, 1)
        executor.close()
        go_on.set()

    run(main())


def test_context_variables_arrive_and_code_inside_calls_directly(make: Make) -> None:
    async def nested() -> tuple[str, bool, int]:
        thread = threading.get_ident()
        inner = await away(threading.get_ident)
        return NAME.get(), thread == inner, await at_home(awaiting, 7)

    async def main() -> None:
        NAME.set("somebody")
        assert await make().run(nested) == ("somebody", True, 7)

    run(main())


def test_cooperative_code_stays_and_other_code_goes_away(make: Make) -> None:
    @cooperative
    async def ours() -> int:
        return threading.get_ident()

    async def main() -> None:
        executor = make()
        here = threading.get_ident()
        EXECUTOR.set(executor)
        assert await away(ours) == here
        assert (await away(threading.get_ident) == here) == isinstance(executor, InlineExecutor)

    run(main())


def test_all_calls_of_an_executor_are_on_one_thread_and_event_loop(make: Make) -> None:
    async def loop() -> int:
        return id(asyncio.get_running_loop())

    async def main() -> None:
        executor, other = make(), make()
        assert len({await executor.run(loop) for _ in range(3)}) == 1
        assert len({await executor.run(threading.get_ident) for _ in range(3)}) == 1
        assert await other.run(plain, 1) == 1

    run(main())


def test_code_that_blocks_its_thread_is_abandoned_and_stops_nobody() -> None:
    begun, again, go_on = threading.Event(), threading.Event(), threading.Event()

    async def block(begun: threading.Event) -> None:
        begun.set()
        go_on.wait()

    async def main() -> None:
        threads = LoopThreads(NO_GRACE_S)
        blocked, other = threads.executor(), threads.executor()
        await cancelled(blocked, lambda: block(begun), begun)
        assert blocked.abandoned and await other.run(plain, 2) == 2 and not other.abandoned
        shared = threads.executor(shared=True)
        await cancelled(shared, lambda: block(again), again)
        assert shared.abandoned and await threads.executor(shared=True).run(plain, 3) == 3

    try:
        run(main())
    finally:
        go_on.set()


def test_a_thread_serves_the_next_environment_once_it_is_empty() -> None:
    async def leave_behind() -> int:
        asyncio.get_running_loop().create_task(asyncio.sleep(1e6))
        return threading.get_ident()

    async def main() -> None:
        threads = LoopThreads(1.0)
        first = threads.executor()
        ident = await first.run(leave_behind)
        second = threads.executor()
        assert await second.run(threading.get_ident) != ident
        first.close()
        async with asyncio.timeout(30):
            while await threads.executor().run(threading.get_ident) != ident:  # it is still being emptied
                pass

    run(main())


def test_a_box_answers_on_its_own_event_loop() -> None:
    class LoopBox:
        """A box that says which event loop it runs on."""

        spec = BoxSpec()

        async def read(self, path: str) -> bytes:
            return str(id(asyncio.get_running_loop())).encode()

        async def fresh(self) -> LoopBox:
            return LoopBox()

    async def main() -> None:
        box = BoxAtHome(LoopBox())

        async def read() -> list[bytes]:
            return [await box.read("a"), await (await box.fresh()).read("b"), str(box.spec).encode()]

        home = str(id(asyncio.get_running_loop())).encode()
        assert await LoopThreads(GRACE_S).executor().run(read) == [home, home, str(BoxSpec()).encode()] == await read()

    run(main())
