"""`RankProcess`: a rank of a trainer in a process of its own on this machine.

A call is two frames: method and data. The answer is any number of ticks, the signs of life of the process, and then two
frames: error and data. The process runs `python -m sparring.cluster.rank_process`.
"""

from __future__ import annotations

import ctypes
import gc
import os
import queue
import signal
import sys
import threading
from contextlib import suppress

from sparring.algo.user_rules import SCRATCH
from sparring.allocator import share_freed_memory
from sparring.cluster.child import ChildProcess, parents_socket
from sparring.cluster.frames import StandsStill, receive, send
from sparring.cluster.rank import Rank, RankEnded

END_S = 10.0
"""Seconds that a process may take to end."""
TICK, TICK_S = b"tick", 1.0
"""Frame that is a sign of life, and the seconds between two."""
YOUNG_OBJECTS = 50_000
"""Threshold of the garbage collector, as `cli.main.YOUNG_OBJECTS`."""
PR_SET_PDEATHSIG = 1
"""Option of prctl(2): the signal that this process gets when the thread that started it has ended."""


class RankProcess:
    """Rank of a trainer in a separate process. The process ends when the thread that made it ends, in whatever way.
    Implements `RankCalls`.

    Args:
        silent_s: seconds without a sign of life after which the process counts as hanging.
        host: address of this machine for the other ranks.
    """

    def __init__(self, rank: int, silent_s: float = 30.0, host: str = "127.0.0.1") -> None:
        self._where, self._silent_s = f"rank {rank} of the trainer", silent_s
        self._limit_s: float | None = None  # until the first sign of life, which `start_timeout_s` waits for
        # -P: not the modules of this folder
        self._process = ChildProcess((sys.executable, "-P", "-m", "sparring.cluster.rank_process", host))

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def call(self, method: str, data: bytes) -> tuple[bytes, bytes]:
        pipe = self._process.socket.fileno()
        if pipe < 0:
            raise RankEnded(f"{self._where}: expected a process, got one that was closed")
        try:
            send(pipe, method.encode(), self._limit_s)
            send(pipe, data, self._limit_s)
            while (failure := receive(pipe, self._limit_s)) == TICK:
                self._limit_s = self._silent_s
            return failure, receive(pipe, self._silent_s)
        except StandsStill as cause:
            silence = f"none for {self._silent_s:g} s"
            raise RankEnded(f"{self._where}: expected a sign of life, got {silence}") from cause
        except (EOFError, OSError) as cause:
            self._process.wait(END_S)
            raise RankEnded(f"{self._where}: expected an answer, got {self._process.exit_status()}") from cause

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        self._process.close(END_S)


def serve(host: str) -> None:
    """Answer the calls that come over standard input, until the input ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # one that is stopped does not see its input end
    gc.set_threshold(YOUNG_OBJECTS)
    share_freed_memory()
    pipe = parents_socket()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # a system may signal every process of a job; a rank ends with its caller
    rank, waiting, writing = Rank(host), queue.SimpleQueue[tuple[str, bytes]](), threading.Lock()
    busy = threading.Event()

    def read() -> None:
        """Read calls. When the caller ends, end this process, also in the middle of a call."""
        with suppress(EOFError, OSError):
            while True:
                method, data = receive(pipe), receive(pipe)
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
                    send(pipe, TICK)

    for watch in (read, tick):
        threading.Thread(target=watch, daemon=True).start()
    while True:
        call = waiting.get()
        busy.set()
        failure, answer = rank.call(*call)
        with writing:
            busy.clear()
            send(pipe, failure)
            send(pipe, answer)


if __name__ == "__main__":
    serve(sys.argv[1])
