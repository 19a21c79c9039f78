"""`RankProcess`: a rank of a trainer in a process of its own on this machine, called over its standard input.

A call is two frames, its method and its data. The answer, on standard output, is any number of ticks, the signs of life
of the process, then two frames, an error and the data. `python -m sparring.cluster.rank_process` is the process's side.
"""

from __future__ import annotations

import ctypes
import gc
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import ExitStack, suppress
from typing import IO

from sparring.algo.user_rules import SCRATCH
from sparring.allocator import share_freed_memory
from sparring.cluster.frames import StandsStill, receive, send
from sparring.cluster.rank import Rank, RankEnded, RankFailure
from sparring.store.codec import decode

END_S = 10.0
"""Seconds that a process may take to end."""
TICK, TICK_S = b"tick", 1.0
"""Frame of a process that runs, and the seconds between two."""
YOUNG_OBJECTS = 50_000
"""As `cli.main.YOUNG_OBJECTS`."""
PR_SET_PDEATHSIG = 1
"""Option of prctl(2): the signal that this process gets when the thread that started it has ended."""


class RankProcess:
    """Rank of a trainer in a process of its own. It ends with the thread that makes it, however that ends, and leaves
    no file. Implements `RankCalls`.

    Args:
        silent_s: seconds without a sign of life after which the process counts as standing still.
    """

    def __init__(self, rank: int, silent_s: float = 30.0) -> None:
        self._rank, self._silent_s = rank, silent_s
        self._limit_s: float | None = None  # until the first sign of life, which `start_timeout_s` waits for
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        with ExitStack() as its, ExitStack() as ours:
            ours.callback(self._log.close)
            calls, self._calls = os.pipe()
            its.callback(os.close, calls)
            ours.callback(os.close, self._calls)
            self._answers, answers = os.pipe()
            ours.callback(os.close, self._answers)
            its.callback(os.close, answers)
            self._process = subprocess.Popen(
                (sys.executable, "-P", "-m", "sparring.cluster.rank_process"),  # -P: not the modules of this folder
                stdin=calls,
                stdout=answers,
                stderr=self._log,
                start_new_session=True,
            )
            ours.pop_all()
        self._open = True

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def call(self, method: str, data: bytes) -> bytes:
        """Call a method of the rank and return its answer. Blocks; one call at a time.

        Raises:
            RankEnded: the process has ended, or stands still.
            SparringError: the call failed.
        """
        if not self._open:  # another file may have the numbers of its pipes
            raise RankEnded(f"rank {self._rank} of the trainer: expected a process, got one that was closed")
        try:
            send(self._calls, method.encode(), self._limit_s)
            send(self._calls, data, self._limit_s)
            while (failure := receive(self._answers, self._limit_s)) == TICK:
                self._limit_s = self._silent_s
            answer = receive(self._answers, self._silent_s)
        except StandsStill as cause:
            where, got = f"rank {self._rank} of the trainer", f"none for {self._silent_s:g} s"
            raise RankEnded(f"{where}: expected a sign of life, got {got}") from cause
        except (EOFError, OSError) as cause:
            raise RankEnded(self._last_words()) from cause
        if failure:
            raise decode(failure, RankFailure).error()
        return answer

    def kill(self) -> None:
        """Kill the process. Calls in progress end with an error."""
        self._process.kill()

    def close(self) -> None:
        """End the process. Safe to call twice."""
        if not self._open:
            return
        self._open = False
        os.close(self._calls)
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._answers)
        self._log.close()

    def _last_words(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        self._log.seek(0)
        log, status = self._log.read()[-2000:].decode(errors="replace"), self._process.returncode
        return f"rank {self._rank} of the trainer: expected an answer, got exit status {status}; its log ends:\n{log}"


def serve() -> None:
    """Answer the calls that come over standard input, until it ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # one that is stopped does not see its input end
    gc.set_threshold(YOUNG_OBJECTS)
    share_freed_memory()
    calls, answers = os.dup(0), os.dup(1)
    os.dup2(2, 1)  # what libraries print is no answer
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # a system may signal every process of a job; a rank ends with its caller
    rank, waiting, writing = Rank(), queue.SimpleQueue[tuple[str, bytes]](), threading.Lock()
    busy = threading.Event()

    def read() -> None:
        """Read calls, and end the process with its caller, also in the middle of a call."""
        with suppress(EOFError, OSError):
            while True:
                method, data = receive(calls), receive(calls)
                waiting.put((method.decode(), data))
        rank.release()
        SCRATCH.close()
        os._exit(0)

    def tick() -> None:
        """Give signs of life during a call."""
        ended = threading.Event()
        while not ended.wait(TICK_S):
            with writing:
                if busy.is_set():
                    send(answers, TICK)

    for watch in (read, tick):
        threading.Thread(target=watch, daemon=True).start()
    while True:
        call = waiting.get()
        busy.set()
        failure, answer = rank.call(*call)
        with writing:
            busy.clear()
            send(answers, failure)
            send(answers, answer)


if __name__ == "__main__":
    serve()
