"""Threads for user code: each environment has a thread of its own, with an event loop.

log/2026-11-23-whose-time.md measures them against one thread for all, which a single blocking call would stop. The
threads are daemons, so the interpreter exits even if user code never ends. Code that holds Python's interpreter lock (a
backtracking regular expression, arithmetic on huge numbers) stops every thread; run such code in a box or a process.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any
from weakref import WeakKeyDictionary

from sparring.envs.executor import GRACE_S, HOME, called, copy_result
from sparring.open_files import allow_files


class LoopThread:
    """Daemon thread that runs an event loop until it is stopped.

    Attributes:
        tasks: unfinished tasks that code on the loop started.
    """

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.loop.set_task_factory(self._create_task)
        self.tasks: set[asyncio.Task[Any]] = set()
        self._thread = threading.Thread(target=self._work, name="environment", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread after its current callback. Safe to call from any thread."""
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.loop.stop)

    def _create_task(self, loop: asyncio.AbstractEventLoop, work: Any, **named: Any) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.Task(work, loop=loop, **named)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    def _work(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        self.loop.close()


class Inbox:
    """Queue of results for an event loop, which wakes up once for all that are ready.

    Attributes:
        gate: lock that lets one thread start per pass of the event loop; a hundred starts at once would block the loop.
    """

    def __init__(self, home: asyncio.AbstractEventLoop) -> None:
        self._home = home
        self._calls: deque[_Call] = deque()
        self._awake = False
        self.gate = asyncio.Lock()

    def put(self, call: _Call) -> None:
        """Send a finished call. Safe to call from any thread."""
        self._calls.append(call)
        if not self._awake and not self._home.is_closed():
            self._awake = True
            self._home.call_soon_threadsafe(self._take)

    def _take(self) -> None:
        self._awake = False
        while self._calls:
            self._calls.popleft().arrive()


class LoopThreads:
    """Pool of threads. A thread serves one environment at a time.

    Args:
        grace_s: seconds for cancelled code to end before it is abandoned.
    """

    def __init__(self, grace_s: float = GRACE_S) -> None:
        self.grace_s = grace_s
        self._idle: deque[LoopThread] = deque()
        self._shared: LoopThread | None = None
        self._inboxes: WeakKeyDictionary[asyncio.AbstractEventLoop, Inbox] = WeakKeyDictionary()
        self._has_files = False

    def inbox(self) -> Inbox:
        """Return the inbox of the running event loop."""
        home = asyncio.get_running_loop()
        if home not in self._inboxes:
            self._inboxes[home] = Inbox(home)
        return self._inboxes[home]

    def executor(self, *, shared: bool = False) -> ThreadExecutor:
        """Return the executor of one environment. Its first call takes a thread.

        Args:
            shared: use the one thread of all shared executors; a call that blocks stops the calls of all.
        """
        return ThreadExecutor(self, shared=shared)

    @property
    def has_idle(self) -> bool:
        """True if there is an idle thread."""
        return bool(self._idle)

    def take(self, *, shared: bool = False) -> LoopThread:
        """Return an idle thread, or the shared one."""
        if shared:
            self._shared = self._shared or LoopThread()
            return self._shared
        if not self._has_files:
            self._has_files = True
            allow_files()
        return self._idle.pop() if self._idle else LoopThread()

    def abandon(self, thread: LoopThread) -> None:
        """Abandon a thread whose call does not end. The thread stops if the call ever ends."""
        if thread is self._shared:
            self._shared = None
        thread.stop()

    def give_back(self, thread: LoopThread) -> None:
        """Cancel the tasks that an environment left on its thread, and make the thread idle; stop the thread if a task
        does not end."""
        if thread is self._shared:
            return
        if thread.tasks:
            thread.loop.call_soon_threadsafe(self._empty, thread, 0)
        else:
            self._idle.append(thread)

    def _empty(self, thread: LoopThread, tries: int) -> None:
        """Make a thread idle, or cancel its tasks and check again later. Runs on the thread itself."""
        if not thread.tasks:
            self._idle.append(thread)
        elif tries < 10:
            for task in tuple(thread.tasks):
                task.cancel()
            thread.loop.call_later(self.grace_s * tries / 10, self._empty, thread, tries + 1)
        else:
            thread.stop()


THREADS = LoopThreads()
"""Pool of this process."""


class ThreadExecutor:
    """Executor on a thread of its own: a call that blocks stops only its own environment. Implements `Executor`.

    Attributes:
        abandoned: True if a cancelled call never ended; it keeps the thread.
    """

    def __init__(self, threads: LoopThreads = THREADS, *, shared: bool = False) -> None:
        self._threads, self._shared = threads, shared
        self._thread: LoopThread | None = None
        self._closed = False
        self.abandoned = False

    async def run(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        if self.abandoned or self._closed:
            raise RuntimeError("an earlier call never ended" if self.abandoned else "the environment is closed")
        if self._thread is None and not self._shared and not self._threads.has_idle:
            async with self._threads.inbox().gate:
                self._take()
                await asyncio.sleep(0)
        return await self._run(function, arguments, named)

    def _take(self) -> None:
        if self._thread is None:
            self._thread, self._inbox = self._threads.take(shared=self._shared), self._threads.inbox()

    async def _run(self, function: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Call a function; the call starts before the first await."""
        self._take()
        assert self._thread is not None
        call = _Call(self._thread.loop, self._inbox, called(function, arguments, named))
        try:
            return await call.result
        except asyncio.CancelledError:
            if not call.ended and not await call.cancelled(self._threads.grace_s):
                self.abandoned = True
                self._threads.abandon(self._thread)
            raise

    async def finish(self, function: Callable[..., Any]) -> Any:
        if self.abandoned or self._closed:
            raise RuntimeError("an earlier call never ended" if self.abandoned else "the environment is closed")
        return await self._run(function, (), {})

    def close(self) -> None:
        """Give the thread back, unless an abandoned call keeps it. Safe to call twice."""
        thread, self._thread = self._thread, None
        self._closed = True
        if thread is not None and not self.abandoned:
            self._threads.give_back(thread)


class _Call:
    """One call on a thread.

    Attributes:
        result: future of the call's result, on the loop that made the call.
    """

    __slots__ = ("_end", "_home", "_inbox", "_loop", "_task", "_work", "ended", "result")

    def __init__(self, loop: asyncio.AbstractEventLoop, inbox: Inbox, work: Coroutine[Any, Any, Any]) -> None:
        self._home = asyncio.get_running_loop()
        self._loop, self._inbox, self._work = loop, inbox, work
        self._task: asyncio.Task[Any] | None = None
        self._end: asyncio.Future[None] | None = None
        self.result: asyncio.Future[Any] = self._home.create_future()
        self.ended = False
        loop.call_soon_threadsafe(self._begin)  # runs in a copy of this context, which the task copies again

    async def cancelled(self, grace_s: float) -> bool:
        """Cancel the call; return whether it ended within the grace period."""
        self._end = self._home.create_future()
        self._loop.call_soon_threadsafe(self._cancel)
        await asyncio.wait((self._end,), timeout=grace_s)
        return self.ended

    def arrive(self) -> None:
        """Deliver the result, on the home loop."""
        assert self._task is not None
        self.ended = True
        if self._end is not None and not self._end.done():
            self._end.set_result(None)
        copy_result(self._task, self.result)

    def _begin(self) -> None:
        HOME.set(self._home)
        self._task = asyncio.Task(self._work, loop=self._loop)
        self._task.add_done_callback(self._answer)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _answer(self, task: asyncio.Task[Any]) -> None:
        """Send the finished call to the inbox of the home loop. Runs on the thread."""
        self._inbox.put(self)
