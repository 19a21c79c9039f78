"""Runs a coroutine to its end from synchronous code, also inside a running event loop, as in a notebook."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from types import FrameType
from typing import Any, TypeVar

from sparring.launch.ending import current
from sparring.observe.wait_reports import awaited

T = TypeVar("T")
HEARD_WITHIN_S = 0.5
"""Seconds that Ctrl-C gives the event loop to cancel the running tasks, before it interrupts the blocking line."""


def block(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end and return its result. Inside a running event loop, the coroutine gets a thread with a
    loop of its own, and the caller waits.

    Raises:
        KeyboardInterrupt: the user pressed Ctrl-C; `work` was cancelled and has cleaned up.
    """
    return _in_a_thread(work) if _is_in_a_loop() else asyncio.run(_interruptible(work))


def _is_in_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _in_a_thread(work: Coroutine[Any, Any, T]) -> T:
    running: Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = Future()

    async def announced() -> T:
        task = asyncio.current_task()
        assert task is not None, "a coroutine that asyncio.run runs is a task"
        running.set_result((task.get_loop(), task))
        return await work

    with ThreadPoolExecutor(1, "sparring") as thread:
        done = thread.submit(asyncio.run, announced())
        try:
            return done.result()
        except KeyboardInterrupt:
            loop, task = running.result()
            loop.call_soon_threadsafe(task.cancel)
            raise


async def _interruptible(work: Coroutine[Any, Any, T]) -> T:
    """Await `work`, and let Ctrl-C and the signals of `Ending` interrupt it even if the event loop is blocked, for
    example by an import that takes seconds."""
    if threading.current_thread() is not threading.main_thread():
        return await work  # only the main thread gets signals
    by_asyncio, task, ending = signal.getsignal(signal.SIGINT), asyncio.current_task(), current()
    assert task is not None, "a coroutine that asyncio.run runs is a task"
    if callable(by_asyncio):
        interrupt = _Interrupt(asyncio.get_running_loop(), by_asyncio)
    else:  # the parent process ignores Ctrl-C, as a shell does for a job in the background
        interrupt = _Interrupt(asyncio.get_running_loop(), lambda number, frame: task.cancel())
    with ExitStack() as stack:
        if callable(by_asyncio):
            signal.signal(signal.SIGINT, interrupt)
            stack.callback(signal.signal, signal.SIGINT, by_asyncio)
        if ending is not None:
            stack.enter_context(ending.interrupting(interrupt))
        try:
            return await work
        except (asyncio.CancelledError, KeyboardInterrupt):
            if interrupt.came is None:
                raise
            raise KeyboardInterrupt(interrupt.came) from None


class _Interrupt:
    """Handler of an interrupt. The first signal lets the event loop cancel its tasks. If the loop does not react in
    time, and at every further signal, KeyboardInterrupt is raised in the line that blocks the loop.

    Args:
        cancel: asyncio's own handler, or another that cancels the main task.

    Attributes:
        came: what was waited for at the first signal; None before it.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, cancel: Callable[[int, FrameType | None], Any]) -> None:
        self._loop, self._cancel_task = loop, cancel
        self.came: str | None = None
        self._raised, self._heard, self._thread = False, threading.Event(), threading.get_ident()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.came is not None:
            self._raised = True
            raise KeyboardInterrupt
        self.came = awaited()
        self._loop.call_soon_threadsafe(self._cancel)
        threading.Thread(target=self._insist, daemon=True).start()

    def _cancel(self) -> None:
        """Cancel the main task, on the event loop. Do nothing after an exception in the main task, so that the task's
        cleanup is not cancelled."""
        self._heard.set()
        if not self._raised:
            self._cancel_task(signal.SIGINT, None)

    def _insist(self) -> None:
        """Interrupt again until the event loop reacts, because an exception in a destructor, for example, is lost. Only
        a signal wakes a thread that sleeps."""
        while not self._heard.wait(HEARD_WITHIN_S):
            signal.pthread_kill(self._thread, signal.SIGINT)
