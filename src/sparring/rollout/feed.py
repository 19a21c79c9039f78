"""Feed of tasks: the source of a run as its scheduler asks it, so that a slow source holds nothing up and an odd task
costs itself alone."""

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
"""Seconds that the event loop waits for a source before it goes on without its answer."""
FAST_S = 0.002
"""Seconds from which other tasks of the loop have their turn after a source's answer."""
MOST_LEFT_OUT = 1000
"""So many odd tasks in a row end the run."""


class TaskFeed:
    """Source whose `next` may take its time: it is called on a thread of its own, and what it should observe meanwhile
    waits until it has answered. A source that answers within `INLINE_S` seconds, as nearly all do, answers before
    anything else happens.

    Args:
        source: where tasks come from.
        report: called with a sentence for each task that is left out.

    Attributes:
        left_out: number of odd tasks.
    """

    def __init__(self, source: TaskSource, report: Callable[[str], None]) -> None:
        self._source, self._report = source, report
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_asked = False
        self._waiting: list[Group] = []
        self.left_out = 0

    async def next(self) -> Task | None:
        """Return the next task that can be rolled out, None at the end.

        Raises:
            BadInput: `MOST_LEFT_OUT` tasks in a row cannot.
        """
        problem = ""
        for _ in range(MOST_LEFT_OUT):
            task = await self._asked()
            problem = "" if task is None else problem_of(task)
            if not problem:
                return task
            self.left_out += 1
            self._report(f"a task is left out: {problem}")
        got = f"{MOST_LEFT_OUT} in a row that cannot ({problem})"
        raise refusal("tasks", "tasks that can be rolled out", got, "mend the source")

    def observe(self, group: Group) -> None:
        """Show the source a scored group, as soon as it does not look for a task."""
        self._waiting.append(group)
        if not self._is_asked:
            self._show()

    def state(self) -> Mapping[str, Any]:
        """Return the state of the source."""
        return self._source.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a state of the source."""
        self._source.restore(state)

    def close(self) -> None:
        """End the thread. A source that does not answer is left behind."""
        if self._thread is not None:
            self._calls.put(None)
            self._thread = None

    async def _asked(self) -> Task | None:
        """Return the source's next task."""
        if self._thread is None:
            self._thread = threading.Thread(target=_answer, args=(self._calls,), name="task source", daemon=True)
            self._thread.start()
        future: Future[Task | None] = Future()
        clock = asyncio.get_running_loop().time  # a virtual one stands still while a source takes its time
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
            self._show()

    def _show(self) -> None:
        """Show the source what waits."""
        waiting, self._waiting = self._waiting, []
        for group in waiting:
            self._source.observe(group)


def _is_done(future: Future[Any], patience_s: float) -> bool:
    """Wait for a future; return whether it is done."""
    try:
        future.exception(patience_s)
    except TimeoutError:
        return False
    return True


def problem_of(task: object) -> str:
    """Return what is wrong with a task, in one sentence; "" for nothing."""
    if not isinstance(task, Task):
        return f"expected a Task, got {task!r:.80}"
    where = f"task {task.id!r:.80}"
    if not isinstance(task.id, str) or not task.id:
        return f"{where}: expected a text as id"
    if isinstance(task.seed, bool) or not isinstance(task.seed, int) or not -(2**63) <= task.seed < 2**64:
        return f"{where}: expected a seed of 64 bits, got {task.seed!r:.80}"
    try:
        msgspec.convert(msgspec.to_builtins(task), Task)
        msgspec.json.encode(task.data, order="sorted")  # as `digest` does, which wants texts as keys
    except (msgspec.ValidationError, TypeError, ValueError, OverflowError) as error:
        return f"{where}: expected what a Task holds, as plain data, got {error}"
    return ""


def _answer(calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]) -> None:
    """Answer calls until there is None."""
    while (call := calls.get()) is not None:
        future, function = call
        with _Settling(future):
            future.set_result(function())


class _Settling:
    """Context that hands what its body raises to a future."""

    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, cause: BaseException | None, trace: object) -> bool:
        if cause is not None:
            self._future.set_exception(cause)
        return True
