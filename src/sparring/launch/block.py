"""A coroutine to its end from plain code, also inside a running event loop, as in a notebook."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


def block(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end and return its result. Inside a running loop it gets a thread and a loop of its own,
    and the caller waits.

    Raises:
        KeyboardInterrupt: the user stopped it; `work` was cancelled and has cleaned up.
    """
    if not _in_a_loop():
        return asyncio.run(work)  # not where its absence is handled, or every traceback would begin with that
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


def _in_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
