"""`ChildProcess`: a process on this machine that ends when the process that started it ends.

Engines and ranks are such children: of the run or, on Ray, of an actor on their node.
"""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

LOG_BYTES = 2000
"""Number of bytes of the log's end in messages."""


class ChildProcess:
    """Child process whose standard input and output are a socket. The child has to end when its input ends; the input
    ends at the latest with this process.

    Args:
        log: file that gets the child's standard error; None for an unnamed temporary file.
        environment: environment variables of the child; None for those of this process.

    Attributes:
        socket: this end of the socket.
    """

    def __init__(
        self, command: Sequence[str], log: Path | None = None, environment: Mapping[str, str] | None = None
    ) -> None:
        with ExitStack() as failed:
            self._log = tempfile.TemporaryFile() if log is None else log.open("a+b")  # noqa: SIM115
            failed.enter_context(self._log)
            self.socket, its = socket.socketpair()
            failed.enter_context(self.socket)
            with its:
                self._process = subprocess.Popen(
                    command,
                    stdin=its.fileno(),
                    stdout=its.fileno(),
                    stderr=self._log,
                    env=environment,
                    start_new_session=True,  # Ctrl-C is for the run, which then ends this process
                )
            failed.pop_all()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def ended(self) -> bool:
        """Whether the process has ended."""
        return self._process.poll() is not None

    def wait(self, within_s: float | None = None) -> None:
        """Wait until the process has ended, at most `within_s` seconds."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(within_s)

    def kill(self) -> None:
        """Kill the process."""
        self._process.kill()

    def end_input(self) -> None:
        """End the child's input, which asks the child to end."""
        with suppress(OSError):  # it has ended, or this was called before
            self.socket.shutdown(socket.SHUT_WR)

    def close(self, within_s: float) -> None:
        """Ask the process to end, and kill it if it has not ended after `within_s` seconds. Safe to call twice."""
        self.end_input()
        self.wait(within_s)
        self._process.kill()
        self._process.wait()
        self.socket.close()
        self._log.close()

    def exit_status(self) -> str:
        """Return a text with the exit status of an ended process and the end of its log."""
        return f"exit status {self._process.returncode}{self.log_end()}"

    def log_end(self) -> str:
        """Return the end of the log as a text that continues a sentence."""
        size = os.fstat(self._log.fileno()).st_size
        # not read through the file, whose position the process shares
        text = os.pread(self._log.fileno(), LOG_BYTES, max(0, size - LOG_BYTES)).decode(errors="replace").strip()
        return f"; the end of its log:\n{text}" if text else "; its log is empty"


def parents_socket() -> int:
    """Return the descriptor of the parent's socket, in the child. From now on, printed output goes to the log."""
    own = os.dup(0)
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    return own
