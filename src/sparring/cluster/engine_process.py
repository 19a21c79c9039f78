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

KEY = "SPARRING_ENGINE_KEY"
"""Environment variable with the key that a run draws for its engines."""

PAUSE_S = 1.0
"""Seconds between a death and the next start."""

END_S = 30.0
"""Seconds that a process may take to end."""


class EngineProcess:
    """Server of an engine on a port of this machine. It ends with the run, however that ends, and leaves no file.

    Args:
        words: arguments of `sparring serve` but for its address.
        key: key that clients send.

    Attributes:
        url: address of the server, the same after each start; empty before the first answer.
        starts: number of starts.
    """

    def __init__(self, words: Sequence[str], key: str) -> None:
        self.url, self.starts = "", 0
        self._command = (sys.executable, "-m", "sparring.cli.main", "serve", *words, "--api-key-env", KEY)
        self._environment: Mapping[str, str] = {**os.environ, KEY: key}
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self._ready, self._ended = threading.Event(), threading.Event()
        self._process = self._start()
        self._watching = threading.Thread(target=self._watch, name="engine process", daemon=True)
        self._watching.start()

    @property
    def pid(self) -> int:
        """Process id of the present process."""
        return self._process.pid

    def wait_until_ready(self, deadline: float) -> None:
        """Wait for the first answer.

        Args:
            deadline: end of the wait, by `time.monotonic`.

        Raises:
            EngineError: the process ended, or is late.
        """
        while not self._ready.wait(0.1):
            late = time.monotonic() > deadline
            if late or (self._process.poll() is not None and self.starts == 1):
                got = "no answer in time" if late else f"exit status {self._process.returncode}"
                log = self._end_of_log()
                self.close()
                raise EngineError(f"engine process: expected it to start, got {got}; the end of its log:\n{log}")

    def kill(self) -> None:
        """Kill the present process, which stands still; another one is started."""
        self._process.kill()

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
        self._log.seek(0)
        return self._log.read()[-2000:].decode(errors="replace")

    def _start(self) -> subprocess.Popen[bytes]:
        self.starts += 1
        port = self.url.rpartition(":")[2] or "0"
        return subprocess.Popen(
            (*self._command, "--until-input-ends", "--port", port),
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,
        )

    def _watch(self) -> None:
        """Start the server again each time that it dies."""
        while True:
            process = self._process
            assert process.stdout is not None
            self._read(process.stdout)
            process.wait()
            process.stdout.close()
            if self._ended.wait(PAUSE_S):
                return
            self._process = self._start()
            if self._ended.is_set() and self._process.stdin is not None:
                self._process.stdin.close()  # it was closed at the same time

    def _read(self, output: IO[bytes]) -> None:
        """Read the server's output to its end; the first line ends with its address."""
        for line in output:
            if not self._ready.is_set():
                self.url = line.decode().split()[-1]
                self._ready.set()
