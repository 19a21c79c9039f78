"""Programs of tests in boxes, and the processes that they are."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from sparring.types import ExecResult


async def run_program(box: Any, argv: list[str], **command: Any) -> ExecResult:
    """Run a program beside a server that accepts nothing; `command` as of `Sandbox.exec`."""

    async def silent(listening: Any) -> None:
        with listening:
            await asyncio.Event().wait()

    result: ExecResult = await box.program(argv, port=8700, served=silent, **command)
    return result


def descendants(pid: int) -> list[int]:
    """Return the process ids of all children of a process and theirs."""
    found = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, children.read_text().split()):
            found += [child, *descendants(child)]
    return found
