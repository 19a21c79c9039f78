"""`Executor`: runs the code of one environment's author, so that code which blocks or ignores cancellation costs its
rollout alone.

    cooperative code (ours)     awaits all that takes time: runs on the run's event loop
    an author's code            may block: runs in the environment's executor, a thread of its own (`threads`)

Under the virtual clock of tests, which cannot wait for threads, the executor is `InlineExecutor`.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from typing import Any, Protocol, TypeVar

C = TypeVar("C", bound=Callable[..., Any])
T = TypeVar("T")

GRACE_S = 1.0
"""Seconds that cancelled code has to end before it is abandoned."""

EXECUTOR: ContextVar[Executor | None] = ContextVar("executor", default=None)
"""The executor of the environment on whose behalf the event loop runs cooperative code; None inside an executor."""

HOME: ContextVar[asyncio.AbstractEventLoop | None] = ContextVar("home", default=None)
"""The run's event loop, inside an executor that has another."""


class Executor(Protocol):
    """Runs the calls of one environment, all on one thread, and knows whether one of them had to be abandoned."""

    @property
    def abandoned(self) -> bool:
        """True after a call went on for `GRACE_S` seconds although it was cancelled."""

    async def run(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Call a function, await its result where that is awaitable, and return it.

        Cancelling the awaiting task cancels the call; a call that goes on after `GRACE_S` seconds is abandoned: it is
        left to itself, and the executor takes no more calls.

        Raises:
            RuntimeError: the executor was abandoned, or the call raised what no future can carry (SystemExit,
                StopIteration).
            Exception: what the call raised.
        """

    async def finish(self, function: Callable[..., Any]) -> Any:
        """Call the function that ends the environment as `run` does, also where the awaiting task is cancelled before
        the call has begun.

        Raises:
            Exception: what the call raised.
        """

    def close(self) -> None:
        """Take no more calls. Safe to call twice."""


class InlineExecutor:
    """Executor on the event loop itself: code that ignores cancellation is abandoned, code that blocks stops the loop.

    Args:
        shared: the loop is shared in any case.
        grace_s: seconds that cancelled code has to end.

    Attributes:
        abandoned: as the protocol says.
    """

    def __init__(self, *, shared: bool = False, grace_s: float = GRACE_S) -> None:
        self.abandoned = False
        self._grace_s = grace_s
        self._tasks: set[asyncio.Task[Any]] = set()

    async def run(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Call a function in a task of its own.

        Raises:
            RuntimeError: the executor was abandoned.
            Exception: what the call raised.
        """
        if self.abandoned:
            raise RuntimeError("an earlier call never ended")
        task = asyncio.get_running_loop().create_task(called(function, arguments, named))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        result = asyncio.get_running_loop().create_future()
        task.add_done_callback(lambda ended: copy_result(ended, result))
        try:
            return await result
        except asyncio.CancelledError:
            if not task.done():
                task.cancel()
                await asyncio.wait((task,), timeout=self._grace_s)
                self.abandoned = self.abandoned or not task.done()
            raise

    async def finish(self, function: Callable[..., Any]) -> Any:
        """Call the function that ends the environment in the awaiting task itself, which begins at once.

        Raises:
            Exception: what the call raised.
        """
        before = EXECUTOR.get()
        try:
            return await called(function, (), {})
        finally:
            EXECUTOR.set(before)

    def close(self) -> None:
        """Do nothing: the event loop is not this executor's."""


def cooperative(method: C) -> C:
    """Mark a function as one that never blocks, or hands over what may: it runs on the run's event loop, which spares
    it two switches of threads."""
    method.__cooperative__ = True  # type: ignore[attr-defined]
    return method


def is_cooperative(function: Callable[..., Any]) -> bool:
    """Return whether a function, or the function of a bound method, is marked as cooperative."""
    return getattr(function, "__cooperative__", False)


async def away(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Run an author's function in the executor of the environment that is being run; where there is none, or the code
    is inside it already, call it at once.

    Raises:
        Exception: what the function raised.
    """
    executor = EXECUTOR.get()
    if executor is not None and not is_cooperative(function):
        return await executor.run(function, *arguments, **named)
    value = function(*arguments, **named)
    return await value if inspect.isawaitable(value) else value


async def at_home(function: Callable[..., Coroutine[Any, Any, T]], *arguments: Any) -> T:
    """Run a coroutine function of what belongs to the run's event loop (boxes, judges), from whichever thread.

    Raises:
        Exception: what the function raised.
    """
    home = HOME.get()
    if home is None or home is asyncio.get_running_loop():
        return await function(*arguments)
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(function(*arguments), home))


async def called(function: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Call a function as code inside an executor; what would end the event loop becomes a RuntimeError. For a task of
    its own, whose context it changes."""
    EXECUTOR.set(None)
    try:
        value = function(*arguments, **named)
        return await value if inspect.isawaitable(value) else value
    except (KeyboardInterrupt, SystemExit, StopIteration) as error:
        raise _carried(error) from error


def copy_result(ended: asyncio.Task[Any], result: asyncio.Future[Any]) -> None:
    """Give a task's result to a future that is still waited for; that of an abandoned task is dropped."""
    error = asyncio.CancelledError() if ended.cancelled() else ended.exception()
    if result.done():
        return
    if error is None:
        result.set_result(ended.result())
    else:
        result.set_exception(error)


def _carried(error: BaseException) -> BaseException:
    """Return what a future can carry of an error: one that would end the thread, the process or an iteration becomes a
    RuntimeError."""
    if isinstance(error, (KeyboardInterrupt, SystemExit, GeneratorExit, StopIteration, StopAsyncIteration)):
        ended = RuntimeError(f"{type(error).__name__}: {error}")
        ended.__cause__ = error
        return ended
    return error
