"""`LineProcess`: a program that answers one line with one line, for checks that may never end or need an interpreter of
their own."""

from __future__ import annotations

import os
import select
import subprocess
from collections.abc import Mapping, Sequence


class LineProcess:
    """One process; it ends with the last reference to it, at the latest with its input.

    Args:
        command: the program and its arguments.
        environment: variables that it has beside this process's.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        self._over = True
        variables = {**os.environ, **(environment or {})}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, env=variables
        )
        self._over = False

    def __del__(self) -> None:
        if not self._over:
            self.end()

    @property
    def ended(self) -> bool:
        """True if the program answers no more."""
        return self._over

    def answer(self, line: bytes, wall_s: float) -> bytes | None:
        """Return the program's answer to a line, both with their line feed; None if it has ended, or says nothing for
        `wall_s` seconds."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        answer = b""
        try:
            stdin.write(line)
            while not answer.endswith(b"\n"):
                if not select.select([stdout], [], [], wall_s)[0]:
                    return None
                piece = os.read(stdout.fileno(), 1 << 16)
                if not piece:
                    self._over = True
                    return None
                answer += piece
        except BrokenPipeError:
            self._over = True
            return None
        return answer

    def end(self) -> int:
        """Kill the program, if it still runs; return its status."""
        if not self._over:
            self._process.kill()
            self._over = True
        status = self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        return status
