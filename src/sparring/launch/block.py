"""A coroutine to its end from plain code, also inside a running event loop, as in a notebook."""

from __future__ import annotations

import asyncio
import signal
import threading
from _thread import interrupt_main
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")
HEARD_WITHIN_S = 0.5
"""For so long Ctrl-C waits for the event loop, so that what is under way is cancelled in order."""


def block(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end and return its result. Inside a running loop it gets a thread and a loop of its own,
    and the caller waits.

    Raises:
        KeyboardInterrupt: the user stopped it; `work` was cancelled and has cleaned up.
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
    """Await `work`, with Ctrl-C heeded where the event loop is held up as well, as by an import of seconds."""
    by_asyncio = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(by_asyncio):
        return await work  # signals reach the main thread alone; or whoever started us has them ignored
    signal.signal(signal.SIGINT, _Interrupt(asyncio.get_running_loop(), by_asyncio))
    try:
        return await work
    finally:
        signal.signal(signal.SIGINT, by_asyncio)


class _Interrupt:
    """Handler of SIGINT. The first lets the loop cancel what runs; where the loop does not come to it in time, and at
    every further one, KeyboardInterrupt is raised in the line that holds the loop up.

    Args:
        loop: the main thread's.
        by_asyncio: asyncio's own handler, which cancels the task that it runs.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, by_asyncio: Callable[[int, FrameType | None], Any]) -> None:
        self._loop, self._by_asyncio = loop, by_asyncio
        self._came, self._raised, self._heard = False, False, threading.Event()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._came:
            self._raised = True
            raise KeyboardInterrupt
        self._came = True
        self._loop.call_soon_threadsafe(self._cancel)
        threading.Thread(target=self._insist, daemon=True).start()

    def _cancel(self) -> None:
        """Cancel, on the loop. Not after an exception: it unwinds the same task, whose cleaning up is left alone."""
        self._heard.set()
        if not self._raised:
            self._by_asyncio(signal.SIGINT, None)

    def _insist(self) -> None:
        """Interrupt again until the loop has heard it: an exception in a destructor, for one, is dropped."""
        while not self._heard.wait(HEARD_WITHIN_S):
            interrupt_main()
