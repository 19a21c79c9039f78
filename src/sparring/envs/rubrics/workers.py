"""`Workers`: checks texts in separate processes, because a regular expression or computer algebra may never end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from sparring.envs.line_process import LineProcess
from sparring.envs.rubrics.config import Mathematics
from sparring.envs.rubrics.text import Text
from sparring.errors import JudgeError

MOST = 4
"""Maximum number of processes, on a machine with as many CPUs."""

WALL_S = 60.0
"""Wall-clock seconds, in addition to a check's limit of processor time, after which its process counts as hung."""


class Workers:
    """Processes that start when needed and end with this one.

    Args:
        count: number of processes; 0: as many as CPUs, at most `MOST`.
        wall_s: wall-clock seconds for one check, on top of its limit of processor time.
    """

    def __init__(self, count: int = 0, *, wall_s: float = WALL_S) -> None:
        self._wall_s = wall_s
        num_processes = count or min(MOST, len(os.sched_getaffinity(0)))
        self._threads = ThreadPoolExecutor(num_processes, thread_name_prefix="check")
        self._own = threading.local()  # each thread has one process

    async def worth(self, part: Text, completion: str, target: Any) -> float:
        """Return `text.worth` under the part's limit; 0 for an answer whose check takes too much time or memory.

        Raises:
            JudgeError: the check failed for another reason, or its process hung or was killed.
        """
        value: float = (await self._answer(part, completion, target))["value"]
        return value

    async def unread(self, part: Mathematics, target: str) -> str:
        """Return why the check cannot read a right answer completely; "" if it can (`mathematics.unread`).
        Raises as `worth`."""
        unread: str = (await self._answer(part, None, target))["unread"]
        return unread

    async def _answer(self, part: Text, completion: str | None, target: Any) -> dict[str, Any]:
        request = {"part": msgspec.to_builtins(part), "completion": completion, "target": target}
        line = json.dumps(request).encode() + b"\n"
        wall_s = part.time_limit_s + self._wall_s
        answer = await asyncio.get_running_loop().run_in_executor(self._threads, self._ask, line, wall_s)
        if "error" in answer:
            raise JudgeError(answer["error"])
        return answer

    def _ask(self, line: bytes, wall_s: float) -> dict[str, Any]:
        process = getattr(self._own, "process", None)
        if process is None or process.ended:
            process = self._own.process = LineProcess([sys.executable, "-m", "sparring.envs.rubrics.worker"])
        answer = process.answer(line, wall_s)
        if answer is not None:
            values: dict[str, Any] = json.loads(answer)
            return values
        hangs, status = not process.ended, process.end()
        if status == -signal.SIGVTALRM:
            return {"value": 0.0, "unread": "more than its time allows"}
        why = f"no answer after {wall_s:g} s" if hangs else f"its process ended with status {status}"
        return {"error": f"check: expected a value, got {why}; see its messages above"}
