"""An agent program of a test in a box, whose port nobody answers at."""

from __future__ import annotations

import asyncio
from typing import Any

from sparring.types import ExecResult


async def run_program(box: Any, argv: list[str], **command: Any) -> ExecResult:
    """Run a program beside a server that accepts nothing; `command` as of `Sandbox.exec`."""

    async def silent(listening: Any) -> None:
        with listening:
            await asyncio.Event().wait()

    result: ExecResult = await box.program(argv, port=8700, served=silent, **command)
    return result
