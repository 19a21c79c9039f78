"""Threads on which the code of environments' authors runs: each environment has one of its own, with an event loop.

Measured against one thread for all of them, which a single blocking call would stop: log/2026-11-23-whose-time.md.
The threads are daemons, so the interpreter's exit does not wait for code that never ends. Code that holds Python's
interpreter lock (a regular expression that backtracks for ever, arithmetic on huge numbers) stops every thread
whatever thread it is on: run such code in a box or in a process.
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
        loop: the event loop.
        tasks: those that code on the loop began and that are not over.
    """

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.loop.set_task_factory(self._begun)
        self.tasks: set[asyncio.Task[Any]] = set()
        self._thread = threading.Thread(target=self._work, name="environment", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread after what it does now. Safe to call from any thread."""
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.loop.stop)

    def _begun(self, loop: asyncio.AbstractEventLoop, work: Any, **named: Any) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.Task(work, loop=loop, **named)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    def _work(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        self.loop.close()


class Inbox:
    """Results on their way to an event loop: threads wake it once for all that are ready.

    Args:
        home: the event loop.

    Attributes:
        gate: held while a thread is made: one in a turn of the event loop, which a hundred at once would stop.
    """

    def __init__(self, home: asyncio.AbstractEventLoop) -> None:
        self._home = home
        self._calls: deque[_Call] = deque()
        self._awake = False
        self.gate = asyncio.Lock()

    def put(self, call: _Call) -> None:
        """Send a call that is over. Safe to call from any thread."""
        self._calls.append(call)
        if not self._awake and not self._home.is_closed():
            self._awake = True
            self._home.call_soon_threadsafe(self._take)

    def _take(self) -> None:
        """Hand the results over, at home."""
        self._awake = False
        while self._calls:
            self._calls.popleft().arrive()


class LoopThreads:
    """Pool of threads. A thread serves one environment at a time and the next one after it.

    Args:
        grace_s: seconds that cancelled code has to end before it is abandoned.
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
        """Return the executor of one environment. It takes a thread with its first call.

        Args:
            shared: all such executors have one thread, so one call that blocks holds up the calls of all.
        """
        return ThreadExecutor(self, shared=shared)

    @property
    def has_idle(self) -> bool:
        """True where a thread need not be made."""
        return bool(self._idle)

    def take(self, *, shared: bool = False) -> LoopThread:
        """Return a thread that serves nobody, or the one that is shared."""
        if shared:
            self._shared = self._shared or LoopThread()
            return self._shared
        if not self._has_files:
            self._has_files = True
            allow_files()
        return self._idle.pop() if self._idle else LoopThread()

    def abandon(self, thread: LoopThread) -> None:
        """Leave a thread to the call that never ends; it stops should that end."""
        if thread is self._shared:
            self._shared = None
        thread.stop()

    def give_back(self, thread: LoopThread) -> None:
        """Take a thread back once the tasks that an environment left on it are cancelled and over; one on which a task
        goes on although it was cancelled is stopped."""
        if thread is self._shared:
            return
        if thread.tasks:
            thread.loop.call_soon_threadsafe(self._empty, thread, 0)
        else:
            self._idle.append(thread)

    def _empty(self, thread: LoopThread, tries: int) -> None:
        """Make a thread idle, or cancel what is left on it and look again. Runs on the thread itself."""
        if not thread.tasks:
            self._idle.append(thread)
        elif tries < 10:
            for task in tuple(thread.tasks):
                task.cancel()
            thread.loop.call_later(self.grace_s * tries / 10, self._empty, thread, tries + 1)
        else:
            thread.stop()


THREADS = LoopThreads()
"""The threads of this process."""


class ThreadExecutor:
    """Executor on a thread of its own: code that blocks stops its own environment alone.

    Args:
        threads: where the thread comes from.
        shared: the thread is that of all shared executors.

    Attributes:
        abandoned: as the protocol says; the thread is left to the call.
    """

    def __init__(self, threads: LoopThreads = THREADS, *, shared: bool = False) -> None:
        self._threads, self._shared = threads, shared
        self._thread: LoopThread | None = None
        self._closed = False
        self.abandoned = False

    async def run(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Call a function on the thread.

        Raises:
            RuntimeError: the executor was abandoned or closed, or the call raised what no future can carry.
            Exception: what the call raised.
        """
        if self.abandoned or self._closed:
            raise RuntimeError("an earlier call never ended" if self.abandoned else "the environment is closed")
        if self._thread is None and not self._shared and not self._threads.has_idle:
            async with self._threads.inbox().gate:
                self._take()
                await asyncio.sleep(0)
        return await self._run(function, arguments, named)

    def _take(self) -> None:
        """Take a thread, if there is none yet."""
        if self._thread is None:
            self._thread, self._inbox = self._threads.take(shared=self._shared), self._threads.inbox()

    async def _run(self, function: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Call a function; the call has begun before anything is awaited."""
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
        """Call the function that ends the environment; it has begun before anything is awaited.

        Raises:
            Exception: what the call raised.
        """
        if self.abandoned or self._closed:
            raise RuntimeError("an earlier call never ended" if self.abandoned else "the environment is closed")
        return await self._run(function, (), {})

    def close(self) -> None:
        """Give the thread back, unless a call has it for good. Safe to call twice."""
        thread, self._thread = self._thread, None
        self._closed = True
        if thread is not None and not self.abandoned:
            self._threads.give_back(thread)


class _Call:
    """One call on a thread.

    Attributes:
        result: of the call, on the event loop that it was made from.
        ended: True once the thread is done with it.
    """

    __slots__ = ("_home", "_inbox", "_loop", "_over", "_task", "_work", "ended", "result")

    def __init__(self, loop: asyncio.AbstractEventLoop, inbox: Inbox, work: Coroutine[Any, Any, Any]) -> None:
        self._home = asyncio.get_running_loop()
        self._loop, self._inbox, self._work = loop, inbox, work
        self._task: asyncio.Task[Any] | None = None
        self._over: asyncio.Future[None] | None = None
        self.result: asyncio.Future[Any] = self._home.create_future()
        self.ended = False
        loop.call_soon_threadsafe(self._begin)  # in a copy of this context, of which the task has a copy again

    async def cancelled(self, grace_s: float) -> bool:
        """Cancel the call; return whether it was over within the grace period."""
        self._over = self._home.create_future()
        self._loop.call_soon_threadsafe(self._cancel)
        await asyncio.wait((self._over,), timeout=grace_s)
        return self.ended

    def arrive(self) -> None:
        """Hand the result over, at home."""
        assert self._task is not None
        self.ended = True
        if self._over is not None and not self._over.done():
            self._over.set_result(None)
        copy_result(self._task, self.result)

    def _begin(self) -> None:
        """Begin the call, on the thread."""
        HOME.set(self._home)
        self._task = asyncio.Task(self._work, loop=self._loop)
        self._task.add_done_callback(self._answer)

    def _cancel(self) -> None:
        """Cancel the call, on the thread."""
        if self._task is not None:
            self._task.cancel()

    def _answer(self, task: asyncio.Task[Any]) -> None:
        """Send the call home once it is over, from the thread."""
        self._inbox.put(self)
