"""Long-running shell, as the box sees it: one text after another. Standard library only, for Python >= 3.9."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from sparring.sandbox.inner.processes import below, parents, signal_each
from sparring.sandbox.inner.run import POLL_S, STREAMS, Output, Run

SHELLS = (("/bin/bash", "--norc", "--noprofile", "--noediting", "-i"), ("/bin/sh", "-i"))
QUIET = {"PS1": "", "PS2": "", "HISTFILE": ""}
BEGINNING = b"_said() { set -- $? $1; echo $2 $1 >&9; return $1; }\n"
BASH_BEGINNING = b"set +H +o history; shopt -u checkwinsize\n"
GRACE_S = 1.0
ROUNDS_ASKED = 3
"""Rounds in which the processes of a text that is out of time get SIGINT before they get SIGKILL."""


def shell_line(limits: dict[str, Any]) -> list[str]:
    """Return the command line of the box's best shell."""
    found = limits["furnished"].tree.first_program(line[0] for line in SHELLS)
    return list(next((line for line in SHELLS if line[0] == found), SHELLS[-1]))


class ShellRun(Run):
    """Running shell. It reads each text as the argument of `eval`, and then reports the text's number and status.

    Attributes:
        call: number of the running text; None if no text runs.
    """

    def __init__(self, request: dict[str, Any], limits: dict[str, Any], reaped: bool = True) -> None:
        request["argv"] = shell_line(limits)
        is_bash = request["argv"][0].endswith("bash")
        self._eval = b"eval " if is_bash else b"command eval "
        request["environment"] = {**QUIET, **(request.get("environment") or {})}
        self.call: int | None = 0  # it has begun, once it has said so
        self._shell, self._heard = 0, b""
        self._before: set[int] = set()
        self._rounds = 0
        super().__init__(request, BEGINNING + (BASH_BEGINNING if is_bash else b"") + b"_said 0\n", limits, reaped)

    def _open(self, request: dict[str, Any]) -> tuple[int, ...]:
        inner = super()._open(request)
        self.heard, said = os.pipe()
        return (*inner, said)

    def files(self) -> list[int]:
        """Return the descriptors that the box holds for the shell."""
        return [*super().files(), *([self.heard] if self.heard >= 0 else [])]

    def close(self) -> None:
        """Close the descriptors that the box holds for the shell."""
        super().close()
        self.heard = -1

    @property
    def begun(self) -> bool:
        """Whether the shell reads texts."""
        return self.call != 0

    def say(self, request: dict[str, Any], text: bytes) -> None:
        """Run a text."""
        self.call, self.limit, self._rounds = request["call"], "", 0
        self.outputs = {name: Output(request["output"]) for name in STREAMS}
        self.started = time.monotonic()
        self.deadline = self.started + request["timeout"]
        tree = parents()
        self._before = set(tree)
        self._shell = self._shell or min(below({self.pid}, tree), default=0)
        quoted = text.replace(b"'", b"'\\''")
        self.feed_more(b"%s'%s' </dev/null 9>&-\n_said %d\n" % (self._eval, quoted, self.call), ends=False)

    def interrupt(self, limit: str) -> bool:
        """Interrupt the running text once more, but not older jobs. Return False if it has had too much time."""
        self.limit = self.limit or limit
        self._rounds += 1
        fresh = below({self.pid}, parents()) - self._before
        if self._rounds > ROUNDS_ASKED:
            signal_each(fresh, signal.SIGKILL)
        signal_each([self._shell, *fresh], signal.SIGINT)
        self.deadline = time.monotonic() + POLL_S
        return self._rounds * POLL_S < GRACE_S

    def hear_status(self) -> int | None:
        """Return the exit status of the running text; None if it has not ended."""
        try:
            self._heard += os.read(self.heard, 1 << 12)
        except BlockingIOError:
            pass
        *lines, self._heard = self._heard[-(1 << 12) :].split(b"\n")
        for line in lines:
            words = line.split()
            if self.call is not None and len(words) == 2 and words[0] == b"%d" % self.call and words[1].isdigit():
                return int(words[1]) & 0xFF
        return None

    def told_call(self, status: int | None) -> tuple[dict[str, Any], list[bytes]]:
        """Return header and bodies of a text's end; `status` is None if the shell has ended with the text."""
        code, self.code = self.code, -9 if self.limit else status if status is not None else self.code
        header, parts = self.told()
        header["call"], self.code, self.call = self.call, code, None
        self.deadline, self.limit = None, "" if status is not None else self.limit
        self.outputs = {name: Output(1 << 16) for name in STREAMS}
        return header, parts
