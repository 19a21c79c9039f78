"""`RankProcess`: a rank of a trainer in a process of its own on this machine, called over its standard input.

A call is two frames, its method and its data; the answer, on standard output, is two, an error and its data. A frame is
its length in 8 bytes, then its bytes. `python -m sparring.cluster.rank_process` is the process's side.
"""

from __future__ import annotations

import gc
import os
import queue
import struct
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from typing import IO

from sparring.allocator import share_freed_memory
from sparring.cluster.rank import Rank, RankFailure
from sparring.errors import TrainerError
from sparring.store.codec import decode

END_S = 30.0
"""Seconds that a process may take to end."""
LENGTH = struct.Struct("<Q")
YOUNG_OBJECTS = 50_000
"""As `cli.main.YOUNG_OBJECTS`."""


class RankEnded(TrainerError):
    """End of a rank's process in a call, or before it."""


class RankProcess:
    """Rank of a trainer in a process of its own. It ends with this process, however that ends, and leaves no file.

    Args:
        rank: number of the rank, for messages.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            (sys.executable, "-m", "sparring.cluster.rank_process"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def call(self, method: str, data: bytes) -> bytes:
        """Call a method of the rank and return its answer. Blocks; one call at a time.

        Raises:
            RankEnded: the process has ended.
            SparringError: the call failed.
        """
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        try:
            write_frame(process.stdin, method.encode())
            write_frame(process.stdin, data)
            failure, answer = read_frame(process.stdout), read_frame(process.stdout)
        except (EOFError, OSError, ValueError) as cause:  # a closed pipe is a ValueError
            raise RankEnded(self._last_words()) from cause
        if failure:
            raise decode(failure, RankFailure).error()
        return answer

    def kill(self) -> None:
        """Kill the process. Calls in progress end with an error."""
        self._process.kill()

    def close(self) -> None:
        """End the process. Safe to call twice."""
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        with suppress(OSError):
            process.stdin.close()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
        self._log.close()

    def _last_words(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        if self._log.closed:
            return f"rank {self._rank} of the trainer: expected an answer, got none: it was closed"
        self._log.seek(0)
        log = self._log.read()[-2000:].decode(errors="replace")
        status = self._process.returncode
        return f"rank {self._rank} of the trainer: expected an answer, got exit status {status}; its log ends:\n{log}"


def write_frame(pipe: IO[bytes], data: bytes) -> None:
    """Write a frame."""
    pipe.write(LENGTH.pack(len(data)))
    pipe.write(data)
    pipe.flush()


def read_frame(pipe: IO[bytes]) -> bytes:
    """Read a frame.

    Raises:
        EOFError: the pipe ends before the frame does.
    """
    (length,) = LENGTH.unpack(_read(pipe, LENGTH.size))
    return _read(pipe, length)


def _read(pipe: IO[bytes], length: int) -> bytes:
    data = pipe.read(length)
    if len(data) < length:
        raise EOFError
    return data


def serve() -> None:
    """Answer the calls that come over standard input, until it ends."""
    gc.set_threshold(YOUNG_OBJECTS)
    share_freed_memory()
    calls, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no answer
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    rank, waiting = Rank(), queue.SimpleQueue[tuple[str, bytes]]()

    def read() -> None:
        """Read calls, and end the process with its caller, also in the middle of a call."""
        with suppress(EOFError, OSError):
            while True:
                method, data = read_frame(calls), read_frame(calls)
                waiting.put((method.decode(), data))
        rank.release()
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    while True:
        for frame in rank.call(*waiting.get()):
            write_frame(answers, frame)


if __name__ == "__main__":
    serve()
