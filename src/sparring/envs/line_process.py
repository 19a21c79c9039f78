"""`LineProcess`: a program that answers each line with a line, for checks that may never end or need their own
interpreter."""

from __future__ import annotations

import os
import select
import subprocess
from collections.abc import Mapping, Sequence


class LineProcess:
    """Process that is killed when the last reference to this object is dropped. If this interpreter dies first, the
    program's input closes, which ends the program.

    Args:
        environment: variables added to this process's environment.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        self._has_ended = True
        variables = {**os.environ, **(environment or {})}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, env=variables
        )
        self._has_ended = False

    def __del__(self) -> None:
        if not self._has_ended:
            self.end()

    @property
    def ended(self) -> bool:
        """True if the program has ended."""
        return self._has_ended

    def answer(self, line: bytes, wall_s: float) -> bytes | None:
        """Send a line to the program and return its answer; both end in a line feed. None if the program has ended or
        writes nothing for `wall_s` seconds."""
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
                    self._has_ended = True
                    return None
                answer += piece
        except BrokenPipeError:
            self._has_ended = True
            return None
        return answer

    def end(self) -> int:
        """Kill the program if it still runs, and return its exit status."""
        if not self._has_ended:
            self._process.kill()
            self._has_ended = True
        status = self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        return status
