"""End of a command by a signal of the system that runs it, such as SLURM or Kubernetes. Everything that a run has
recorded is durable, so nothing is lost, and the same command goes on."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""Signals that end a command: what a system sends first, and what SLURM sends with `--signal=B:USR1@60`."""
STATUS = 75
"""Exit status: try again later (EX_TEMPFAIL of BSD's `sysexits.h`)."""
WITHIN_S = 50.0
"""Seconds from the first signal to the end of the process. Systems kill it after 30 (Kubernetes), 60 or more."""

Handler = Callable[[int, FrameType | None], Any]


class Ending:
    """Handler of `SIGNALS`. The first signal, `came`, interrupts the command like Ctrl-C, so that it closes its parts.
    At a second one, or after `within_s` seconds, the process ends at once: closing waits for a call of the trainer,
    which may take longer."""

    def __init__(self, within_s: float = WITHIN_S) -> None:
        self.came: signal.Signals | None = None
        self._last = threading.Timer(within_s, _leave)
        self._last.daemon = True
        self._interrupt: Handler = signal.default_int_handler

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.came is not None:
            _leave()
        self.came = signal.Signals(number)
        self._last.start()
        self._interrupt(signal.SIGINT, frame)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle the signals inside a context, except those that the parent process ignores. Only the main thread
        gets signals; in others nothing changes."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in SIGNALS}
        heard = [number for number in SIGNALS if before[number] is not signal.SIG_IGN]
        for number in heard:
            signal.signal(number, self)
        try:
            yield
        finally:
            for number in heard:
                signal.signal(number, before[number])
            self._last.cancel()

    @contextmanager
    def interrupting(self, interrupt: Handler) -> Iterator[None]:
        """Call `interrupt` at the first signal inside a context, instead of raising KeyboardInterrupt."""
        before, self._interrupt = self._interrupt, interrupt
        try:
            yield
        finally:
            self._interrupt = before


def current() -> Ending | None:
    """Return the handler of signals of this process; None if it has none."""
    handlers = [signal.getsignal(number) for number in SIGNALS]
    return next((handler for handler in handlers if isinstance(handler, Ending)), None)


def _leave() -> None:
    """End the process as kill -9 would: its boxes and servers end with it, and the next run begins with the record.
    Shared memory, which only the next publisher would remove, is removed here."""
    shared = sys.modules.get("sparring.weights.shared_memory")  # not loaded: nothing was published
    if shared is not None:
        for path in shared.FOLDER.glob(f"{shared.PREFIX}{os.getpid()}-*"):
            path.unlink(missing_ok=True)
    os.write(2, b"\nended at once; the same command goes on where the record ends\n")
    os._exit(STATUS)
