"""`EngineProcess`: a `sparring serve` process that a run starts for itself, and restarts when it dies."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence

from sparring.cluster.child import ChildProcess
from sparring.errors import EngineError
from sparring.kernels.devices import VISIBLE

KEY = "SPARRING_ENGINE_KEY"
"""Environment variable with the random API key that a run generates for its engines."""

PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""Seconds of the first and of the longest pause before a restart."""

MOST_DEATHS = 6
"""Number of deaths without a reply in between after which a process is not restarted."""

END_S = 30.0
"""Seconds that a process may take to end."""


class DeadEngine(EngineError):
    """Error of an engine whose process has died `MOST_DEATHS` times in a row and is not restarted any more."""


def serving(words: Sequence[str]) -> tuple[str, ...]:
    """Return the command line of a server that ends with the run. `words` are the arguments of `sparring serve`,
    without address and key."""
    return (
        *(sys.executable, "-P", "-m", "sparring.cli.main", "serve", *words),  # -P: not the modules of this folder
        *("--api-key-env", KEY, "--until-input-ends"),
    )


class EngineProcess:
    """Server process of an engine on a port of this machine, which ends with this process. Implements `PlacedEngine`;
    the argument `last` of `find` has no effect.

    Args:
        command: program and arguments, without the port. The first line of its output has to end with its address.
        gpu: GPU of the server, as the value of the variable `VISIBLE`; "" for the GPUs of this process.
        pause_s: seconds between the first death and the next start; each further death in a row doubles them.

    Attributes:
        url: address of the server, the same after each start; empty before the first answer.
        starts: number of starts.
    """

    def __init__(self, command: Sequence[str], key: str, *, gpu: str = "", pause_s: float = PAUSE_S) -> None:
        self.url, self.starts = "", 0
        self._command, self._pause_s = command, pause_s
        self._environment: Mapping[str, str] = {**os.environ, KEY: key} | ({VISIBLE: gpu} if gpu else {})
        self._changed, self._ended = threading.Condition(), threading.Event()
        self._answers, self._deaths = False, 0
        self._given_up: DeadEngine | None = None
        self._found: ChildProcess | None = None
        self._process = self._start()
        self._watching = threading.Thread(target=self._watch, name="engine process", daemon=True)
        self._watching.start()

    def find(self, within_s: float, last: bool = False) -> str:
        deadline = time.monotonic() + within_s
        with self._changed:
            while not self._answers or self._process.ended:
                if self._given_up is not None:
                    raise self._given_up
                rest_s = deadline - time.monotonic()
                if rest_s <= 0:
                    log = self._process.log_end()
                    raise EngineError(f"engine process: expected it to start, got no answer in time{log}")
                self._changed.wait(rest_s)
            self._found = self._process
            return self.url

    def kill(self) -> None:
        with self._changed:
            if self._found is self._process:
                self._answers = False
                self._process.kill()

    def replied(self) -> None:
        self._deaths = 0

    def close(self) -> None:
        with self._changed:  # none is started from here on
            self._ended.set()
        self._process.close(END_S)
        self._watching.join()

    def _start(self) -> ChildProcess:
        self.starts += 1
        port = self.url.rpartition(":")[2] or "0"
        return ChildProcess((*self._command, "--port", port), environment=self._environment)

    def _watch(self) -> None:
        while True:
            self._read()
            self._process.wait()
            pause_s = self._count_death()
            if pause_s is None or self._ended.wait(pause_s):
                return
            with self._changed:
                if self._ended.is_set():
                    return
                self._process.close(0)
                self._process = self._start()

    def _read(self) -> None:
        """Read the server's output to the end; the first line ends with the server's address."""
        with self._process.socket.makefile("rb") as output:
            for line in output:
                with self._changed:
                    self.url = self.url or line.decode().split()[-1]
                    self._answers = True
                    self._changed.notify_all()

    def _count_death(self) -> float | None:
        """Count a death of the process; return the seconds until the next start, None if it is not restarted."""
        with self._changed:
            self._answers, self._deaths = False, self._deaths + 1
            if self._ended.is_set():
                return None
            if self.url and self._deaths < MOST_DEATHS:
                return min(self._pause_s * 2.0 ** (self._deaths - 1), LONGEST_PAUSE_S)
            found = f"{self._deaths} deaths in a row without a reply, the last" if self.url else "it ended"
            status = self._process.exit_status()
            self._given_up = DeadEngine(f"engine process: expected it to serve, got {found} with {status}")
            self._changed.notify_all()
            return None
