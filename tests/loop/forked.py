"""Processes of `sparring` forked from a template (tests/loop/template.py), for tests that start many."""

from __future__ import annotations

import ctypes
import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

TEMPLATE = Path(__file__).parent / "template.py"
SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER
_prctl = ctypes.CDLL(None).prctl


@lru_cache(1)
def template() -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Start the template of this process, which ends with it; returns where it takes requests, and its process."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with its:
        command = [sys.executable, str(TEMPLATE), str(its.fileno())]
        alone = {**os.environ, "OMP_NUM_THREADS": "1"}  # imports start no threads, which a fork would lose
        return ours, subprocess.Popen(command, pass_fds=[its.fileno()], stdin=subprocess.DEVNULL, env=alone)


class Forked(subprocess.Popen[str]):
    """Process of `sparring` with these words; in all else a `Popen` whose output is text.

    Args:
        words: after the program's name.
        streams: `stdin`, `stdout`, `stderr`, `cwd` and `env`, as Popen takes them.
    """

    def __init__(self, words: Sequence[str], **streams: Any) -> None:
        super().__init__(["sparring", *map(str, words)], text=True, **streams)

    def _execute_child(self, args: Any, *others: Any) -> None:
        """Fork the template where Popen would start a program. `others` are Popen's own arguments in their order: the
        folder is at 4, the environment at 5, both ends of three streams begin at 9; -1 is a stream that the process shares with us."""
        ends = others[9:15]
        streams = [own if end == -1 else end for own, end in enumerate((ends[0], ends[3], ends[5]))]
        folder, environment = str(others[4] or os.getcwd()), dict(os.environ if others[5] is None else others[5])
        request = {"words": args, "folder": folder, "environment": environment}
        requests, _ = template()
        _prctl(SUBREAPER, 1, 0, 0, 0)
        try:
            socket.send_fds(requests, [json.dumps(request).encode()], streams)
            self.pid = int(requests.recv(64))
            requests.recv(64)
        finally:
            _prctl(SUBREAPER, 0, 0, 0, 0)
        self._child_created = True
        self._close_pipe_fds(*ends)


def finished(
    words: Sequence[str], text: str | None = None, timeout: float = 300, **streams: Any
) -> subprocess.CompletedProcess[str]:
    """Run a forked process to its end, with `text` as its input; as `subprocess.run` with its output captured."""
    given = None if text is None else subprocess.PIPE
    with Forked(words, stdin=given, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **streams) as process:
        try:
            out, error = process.communicate(text, timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        return subprocess.CompletedProcess(process.args, process.returncode, out, error)
