"""Interrupts of a command that works in an event loop: by Ctrl-C, and by the system that runs it, such as SLURM or
Kubernetes. Everything that a run has recorded is durable, so nothing is lost: the same command, run again, goes on."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any, TypeVar

from sparring.observe.wait_reports import awaited

T = TypeVar("T")
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""Signals that end a command: what a system sends first, and what SLURM sends with `--signal=B:USR1@60`."""
STATUS = 75
"""Exit status: try again later (EX_TEMPFAIL of BSD's `sysexits.h`)."""
WITHIN_S = 50.0
"""Seconds from the first signal to the end of the process. Systems kill it after 30 (Kubernetes), 60 or more."""
HEARD_WITHIN_S = 0.5
"""Seconds that an interrupt gives the event loop to cancel the running tasks, before the blocking line is
interrupted."""

Handler = Callable[[int, FrameType | None], Any]


def block(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end and return its result. Inside a running event loop, as in a notebook, the coroutine
    gets a thread with a loop of its own, and the caller waits.

    Raises:
        KeyboardInterrupt: the command was interrupted; `work` was cancelled and has cleaned up.
    """
    return _in_a_thread(work) if _is_in_a_loop() else asyncio.run(_interruptible(work))


class Ending:
    """Handler of `SIGNALS`. The first signal, `came`, interrupts the command like Ctrl-C, so that it closes its parts.
    At a second signal, or after `within_s` seconds, the process ends at once: closing waits for a call of the trainer,
    which may take longer."""

    def __init__(self, within_s: float = WITHIN_S) -> None:
        self.came: signal.Signals | None = None
        self.interrupt: Handler = signal.default_int_handler
        self._last = threading.Timer(within_s, _leave)
        self._last.daemon = True

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.came is not None:
            _leave()
        self.came = signal.Signals(number)
        self._last.start()
        self.interrupt(signal.SIGINT, frame)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle the signals inside a context, except those that the parent process ignores. Only the main thread
        gets signals; in others nothing changes."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        with ExitStack() as stack:
            stack.callback(self._last.cancel)
            for number in SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    _handle(number, self, stack)
            yield


def _handle(number: signal.Signals, handler: Handler, stack: ExitStack) -> None:
    """Set the handler of a signal until `stack` is closed."""
    stack.callback(signal.signal, number, signal.signal(number, handler))


def _leave() -> None:
    """End the process as kill -9 would: its boxes and servers end with it, and a resume starts from the record. Shared
    memory, which only the next publisher would remove, is removed here."""
    shared = sys.modules.get("sparring.weights.shared_memory")  # not loaded: nothing was published
    if shared is not None:
        for path in shared.FOLDER.glob(f"{shared.PREFIX}{os.getpid()}-*"):
            path.unlink(missing_ok=True)
    os.write(2, b"\nended at once; the same command goes on where the record ends\n")
    os._exit(STATUS)


def _is_in_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _in_a_thread(work: Coroutine[Any, Any, T]) -> T:
    running: Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = Future()

    async def announced() -> T:
        running.set_result((asyncio.get_running_loop(), _current_task()))
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
    interrupt = _Interrupt(asyncio.get_running_loop(), _current_task())
    with ExitStack() as stack:
        if callable(signal.getsignal(signal.SIGINT)):  # else the parent ignores it: a shell's job in the background
            _handle(signal.SIGINT, interrupt, stack)
        for ending in map(signal.getsignal, SIGNALS):
            if isinstance(ending, Ending):
                stack.callback(setattr, ending, "interrupt", ending.interrupt)
                ending.interrupt = interrupt
        try:
            return await work
        except (asyncio.CancelledError, KeyboardInterrupt):
            if interrupt.came is None:
                raise
            raise KeyboardInterrupt(interrupt.came) from None


def _current_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None, "a coroutine that asyncio.run runs is a task"
    return task


class _Interrupt:
    """Handler of an interrupt. The first signal lets the event loop cancel the main task. If the loop does not react in
    time, and at every further signal, KeyboardInterrupt is raised in the line that blocks the loop.

    Attributes:
        came: what the command waited for at the first signal; None before the first signal.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, task: asyncio.Task[Any]) -> None:
        self._loop, self._task = loop, task
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
            self._task.cancel()

    def _insist(self) -> None:
        """Interrupt again until the event loop reacts, because an exception in a destructor, for example, is lost. Only
        a signal wakes a thread that sleeps."""
        while not self._heard.wait(HEARD_WITHIN_S):
            signal.pthread_kill(self._thread, signal.SIGINT)
