"""`EngineProcess`: a `sparring serve` that a run starts for itself, and starts again when it dies."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from typing import IO

from sparring.errors import EngineError
from sparring.kernels.devices import VISIBLE

KEY = "SPARRING_ENGINE_KEY"
"""Environment variable with the key that a run draws for its engines."""

PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""Seconds of the first pause and of the longest one."""

MOST_DEATHS = 6
"""Number of deaths in a row, without a reply in between, after which a process is not started again."""

END_S = 30.0
"""Seconds that a process may take to end."""

SHOWN = 2000
"""Number of bytes of the log's end in messages."""


class DeadEngine(EngineError):
    """The process of an engine dies again and again, and is not started any more."""


def serving(words: Sequence[str]) -> tuple[str, ...]:
    """Return the command of a server that ends with the run. `words` are the arguments of `sparring serve`, without
    address and key."""
    return (
        *(sys.executable, "-P", "-m", "sparring.cli.main", "serve", *words),  # -P: not the modules of this folder
        *("--api-key-env", KEY, "--until-input-ends"),
    )


class EngineProcess:
    """Server of an engine on a port of this machine. It ends with the run, however that ends, and leaves no file.

    Args:
        command: program and arguments, without its port. Its first line ends with its address.
        gpu: name of its GPU for `VISIBLE`; "" for those of this process.
        pause_s: seconds between the first death and the next start; each further death in a row doubles them.

    Attributes:
        url: address of the server, the same after each start; empty before the first answer.
        starts: number of starts.
    """

    def __init__(self, command: Sequence[str], key: str, *, gpu: str = "", pause_s: float = PAUSE_S) -> None:
        self.url, self.starts = "", 0
        self._command, self._pause_s = command, pause_s
        self._environment: Mapping[str, str] = {**os.environ, KEY: key} | ({VISIBLE: gpu} if gpu else {})
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self._changed, self._ended = threading.Condition(), threading.Event()
        self._answers, self._deaths = False, 0
        self._given_up: DeadEngine | None = None
        self._found: subprocess.Popen[bytes] | None = None
        self._process = self._start()
        self._watching = threading.Thread(target=self._watch, name="engine process", daemon=True)
        self._watching.start()

    def find(self, deadline: float, last: bool = False) -> str:
        """Wait until the server answers or `time.monotonic` reaches `deadline`, and return its address. Nothing gives
        way to this process, so `last` has no effect.

        Raises:
            DeadEngine: it is not started any more. One that dies before its first answer is not started again.
            EngineError: it is late.
        """
        with self._changed:
            while not (self._answers and self._process.poll() is None):
                if self._given_up is not None:
                    raise self._given_up
                left = deadline - time.monotonic()
                if left <= 0:
                    raise EngineError(
                        f"engine process: expected it to start, got no answer in time{self._end_of_log()}"
                    )
                self._changed.wait(left)
            self._found = self._process
            return self.url

    def kill(self) -> None:
        """Kill the process that `find` found last, if it is still the present one; another one is started."""
        with self._changed:
            if self._found is self._process:
                self._answers = False
                self._process.kill()

    def replied(self) -> None:
        """Reset the count of deaths in a row."""
        self._deaths = 0

    def close(self) -> None:
        """End the process. Safe to call twice."""
        self._ended.set()
        process = self._process
        if process.stdin is not None:
            process.stdin.close()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._watching.join()
        self._log.close()

    def _end_of_log(self) -> str:
        size = os.fstat(self._log.fileno()).st_size
        # not read through the file, whose position the process shares
        text = os.pread(self._log.fileno(), SHOWN, max(0, size - SHOWN)).decode(errors="replace").strip()
        return f"; the end of its log:\n{text}" if text else "; its log is empty"

    def _start(self) -> subprocess.Popen[bytes]:
        self.starts += 1
        port = self.url.rpartition(":")[2] or "0"
        return subprocess.Popen(
            (*self._command, "--port", port),
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,
        )

    def _watch(self) -> None:
        while True:
            process = self._process
            assert process.stdout is not None
            self._read(process.stdout)
            process.wait()
            process.stdout.close()
            pause_s = self._count_death()
            if pause_s is None or self._ended.wait(pause_s):
                return
            with self._changed:
                self._process = self._start()
            if self._ended.is_set() and self._process.stdin is not None:
                self._process.stdin.close()  # it was closed at the same time

    def _count_death(self) -> float | None:
        """Return the seconds until the next start; None if there is none."""
        with self._changed:
            self._answers, self._deaths = False, self._deaths + 1
            if self._ended.is_set():
                return None
            if self.url and self._deaths < MOST_DEATHS:
                return min(self._pause_s * 2.0 ** (self._deaths - 1), LONGEST_PAUSE_S)
            got = "it ended" if not self.url else f"{self._deaths} deaths in a row without a reply, the last"
            got += f" with exit status {self._process.returncode}{self._end_of_log()}"
            self._given_up = DeadEngine(f"engine process: expected it to serve, got {got}")
            self._changed.notify_all()
            return None

    def _read(self, output: IO[bytes]) -> None:
        """Read the server's output to its end; the first line ends with its address."""
        for line in output:
            with self._changed:
                self.url = self.url or line.decode().split()[-1]
                self._answers = True
                self._changed.notify_all()
