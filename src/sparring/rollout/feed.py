"""Feed of tasks: reads a task source on a thread of its own, so that a slow source does not block the event loop, and
leaves out invalid tasks."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

import msgspec

from sparring.errors import refusal
from sparring.protocols import TaskSource
from sparring.types import Group, Task

INLINE_S = 0.02
"""Seconds that the event loop waits for the source before it runs other work."""
FAST_S = 0.002
"""Duration of a source's answer, in seconds, above which other coroutines run before the next answer."""
MOST_LEFT_OUT = 1000
"""Number of consecutive invalid tasks that ends the run."""


class TaskFeed:
    """Task source whose `next` may be slow. The source runs on a thread. While it makes a task, the groups that it
    should observe are queued. If it answers within `INLINE_S` seconds, no other coroutine runs before the answer.

    Args:
        report: called with a sentence for each invalid task.

    Attributes:
        left_out: number of invalid tasks.
    """

    def __init__(self, source: TaskSource, report: Callable[[str], None]) -> None:
        self._source, self._report = source, report
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_asked = False
        self._waiting: list[Group] = []
        self.left_out = 0

    async def next(self) -> Task | None:
        """Return the next valid task, or None at the end of the source. Raises BadInput if `MOST_LEFT_OUT` consecutive
        tasks are invalid."""
        problem = ""
        for _ in range(MOST_LEFT_OUT):
            task = await self._ask_source()
            problem = "" if task is None else problem_of(task)
            if not problem:
                return task
            self.left_out += 1
            self._report(f"a task is left out: {problem}")
        failures = f"{MOST_LEFT_OUT} in a row that cannot ({problem})"
        raise refusal("tasks", "tasks that can be rolled out", failures, "mend the source")

    def observe(self, group: Group) -> None:
        """Show the source a scored group, once the source is not busy with a task."""
        self._waiting.append(group)
        if not self._is_asked:
            self._show_groups()

    def state(self) -> Mapping[str, Any]:
        """Return the state of the source."""
        return self._source.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a state of the source."""
        self._source.restore(state)

    def close(self) -> None:
        """End the thread, without waiting for a source that does not answer."""
        if self._thread is not None:
            self._calls.put(None)
            self._thread = None

    async def _ask_source(self) -> Task | None:
        if self._thread is None:
            self._thread = threading.Thread(target=_run_calls, args=(self._calls,), name="task source", daemon=True)
            self._thread.start()
        future: Future[Task | None] = Future()
        clock = asyncio.get_running_loop().time  # a virtual clock stands still while the source works
        self._is_asked, began_s = True, clock()
        try:
            self._calls.put((future, self._source.next))
            while not _is_done(future, INLINE_S):
                if clock() - began_s >= INLINE_S:
                    await asyncio.wait([asyncio.wrap_future(future)])
            if clock() - began_s > FAST_S:
                await asyncio.sleep(0)
            return future.result()
        finally:
            self._is_asked = False
            self._show_groups()

    def _show_groups(self) -> None:
        waiting, self._waiting = self._waiting, []
        for group in waiting:
            self._source.observe(group)


def _is_done(future: Future[Any], patience_s: float) -> bool:
    try:
        future.exception(patience_s)
    except TimeoutError:
        return False
    return True


def problem_of(task: object) -> str:
    """Return the problem of an invalid task in one sentence, or "" for a valid task."""
    if not isinstance(task, Task):
        return f"expected a Task, got {task!r:.80}"
    where = f"task {task.id!r:.80}"
    if not isinstance(task.id, str) or not task.id:
        return f"{where}: expected a text as id"
    if isinstance(task.seed, bool) or not isinstance(task.seed, int) or not -(2**63) <= task.seed < 2**64:
        return f"{where}: expected a seed of 64 bits, got {task.seed!r:.80}"
    try:
        msgspec.convert(msgspec.to_builtins(task), Task)
        msgspec.json.encode(task.data, order="sorted")  # `digest` needs keys that are texts
    except (msgspec.ValidationError, TypeError, ValueError, OverflowError) as error:
        return f"{where}: expected what a Task holds, as plain data, got {error}"
    return ""


def _run_calls(calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]) -> None:
    while (call := calls.get()) is not None:
        future, function = call
        with _Settling(future):
            future.set_result(function())


class _Settling:
    """Context manager that passes an exception of its body to a future."""

    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, cause: BaseException | None, trace: object) -> bool:
        if cause is not None:
            self._future.set_exception(cause)
        return True
