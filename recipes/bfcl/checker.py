"""BFCL's checker, asked from outside: one process of its own interpreter for a whole run."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import asked
from package import Package

from sparring.envs.line_process import LineProcess
from sparring.errors import EnvError

WALL_S = 100.0
"""Wall clock after which an answer is given up. The first one waits for the imports, ten seconds on a free machine."""


class Verdict(NamedTuple):
    """What BFCL says of a reply's calls; `error` is its name for what is wrong."""

    valid: bool
    error: str


class Checker:
    """The process starts when it is first asked, is started again after it has ended, and ends with this object.

    Args:
        package: whose checker it is.
        wall_s: seconds that an answer may take.
    """

    def __init__(self, package: Package, *, wall_s: float = WALL_S) -> None:
        self._command = (str(package.python), "-I", str(Path(asked.__file__)))
        self._environment = {"BFCL_PROJECT_ROOT": str(package.python.parents[1] / "project")}
        self._wall_s = wall_s
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="bfcl")  # one question at a time, off the event loop
        self._process: LineProcess | None = None

    async def verdict(
        self,
        category: str,
        functions: Sequence[Mapping[str, Any]],
        answer: Sequence[Mapping[str, Any]],
        calls: Sequence[Mapping[str, Any]],
    ) -> Verdict:
        """Ask about the calls of one reply.

        Args:
            category: of the task.
            functions: of the task, as BFCL describes them.
            answer: of the task; empty where no function fits.
            calls: each as {name: {argument: value}}.

        Raises:
            EnvError: the process ended, or gave no answer in time: no verdict.
        """
        question = {"category": category, "functions": functions, "answer": answer, "calls": calls}
        line = json.dumps(question).encode() + b"\n"
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._ask, line)

    def close(self) -> None:
        """End the process, once it has answered."""
        self._threads.shutdown()
        if self._process is not None:
            self._process.end()

    def _ask(self, line: bytes) -> Verdict:
        if self._process is None or self._process.ended:
            self._process = LineProcess(self._command, self._environment)
        process = self._process
        answer = process.answer(line, self._wall_s)
        if answer is not None:
            return Verdict(**json.loads(answer))
        hangs = not process.ended
        status = process.end()
        why = f"no answer after {self._wall_s:g} s" if hangs else f"its process ended with status {status}"
        raise EnvError(f"BFCL's checker: expected a verdict, got {why}; see its messages above")
