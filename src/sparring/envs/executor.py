"""`Executor`: runs user code of one environment, so that code which blocks or ignores cancellation fails only its own
rollout.

    cooperative code    never blocks: runs on the run's event loop
    user code           may block: runs in the environment's executor, on a thread of its own (`threads`)

The virtual clock of tests cannot wait for threads; under it the executor is `InlineExecutor`.
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
"""Seconds for cancelled code to end before it is abandoned."""

EXECUTOR: ContextVar[Executor | None] = ContextVar("executor", default=None)
"""Executor of the environment that the current cooperative code belongs to; None inside an executor."""

HOME: ContextVar[asyncio.AbstractEventLoop | None] = ContextVar("home", default=None)
"""The run's event loop, for code in an executor with an event loop of its own."""


class Executor(Protocol):
    """Runner of one environment's calls, all on one thread."""

    @property
    def abandoned(self) -> bool:
        """True if a cancelled call was still running after `GRACE_S` seconds."""

    async def run(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Call a function, await an awaitable result, and return it.

        Cancelling the awaiting task cancels the call. A call that still runs after `GRACE_S` seconds is abandoned: it
        may go on, and the executor accepts no more calls.

        Raises:
            RuntimeError: the executor was abandoned, or the call raised an exception that a future cannot carry
                (SystemExit, StopIteration).
        """

    async def finish(self, function: Callable[..., Any]) -> Any:
        """Call the function that ends the environment, as `run` does. It starts even if the awaiting task has been
        cancelled."""

    def close(self) -> None:
        """Refuse further calls. Safe to call twice."""


class InlineExecutor:
    """Executor on the event loop itself: a cancelled call that goes on is abandoned, a call that blocks stops the loop.
    Implements `Executor`.

    Args:
        shared: ignored, since all share the event loop.
    """

    def __init__(self, *, shared: bool = False, grace_s: float = GRACE_S) -> None:
        self.abandoned = False
        self._grace_s = grace_s
        self._tasks: set[asyncio.Task[Any]] = set()

    async def run(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
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
        before = EXECUTOR.get()
        try:
            return await called(function, (), {})
        finally:
            EXECUTOR.set(before)

    def close(self) -> None:
        """Do nothing: the event loop outlives this executor."""


def cooperative(method: C) -> C:
    """Mark a function to run directly on the run's event loop, without switching threads. The function must never
    block, or must pass blocking work to another thread."""
    method.__cooperative__ = True  # type: ignore[attr-defined]
    return method


def is_cooperative(function: Callable[..., Any]) -> bool:
    """Return whether a function or bound method is marked as cooperative."""
    return getattr(function, "__cooperative__", False)


async def away(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Run a user's function in the current environment's executor. Call the function directly if there is no executor,
    or if the caller already runs in it."""
    executor = EXECUTOR.get()
    if executor is not None and not is_cooperative(function):
        return await executor.run(function, *arguments, **named)
    value = function(*arguments, **named)
    return await value if inspect.isawaitable(value) else value


async def at_home(function: Callable[..., Coroutine[Any, Any, T]], *arguments: Any, **named: Any) -> T:
    """Await a coroutine function on the run's event loop, to which boxes and judges belong, from any thread."""
    home = HOME.get()
    if home is None or home is asyncio.get_running_loop():
        return await function(*arguments, **named)
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(function(*arguments, **named), home))


async def called(function: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Call a function inside an executor; exceptions that would end the event loop become RuntimeErrors. Must run in an
    asyncio task of its own, because it changes the context."""
    EXECUTOR.set(None)
    try:
        value = function(*arguments, **named)
        return await value if inspect.isawaitable(value) else value
    except (KeyboardInterrupt, SystemExit, StopIteration) as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


def copy_result(ended: asyncio.Task[Any], result: asyncio.Future[Any]) -> None:
    """Copy a finished task's result to the future that waits for it; the result of an abandoned task is dropped."""
    error = asyncio.CancelledError() if ended.cancelled() else ended.exception()
    if result.done():
        return
    if error is None:
        result.set_result(ended.result())
    else:
        result.set_exception(error)
