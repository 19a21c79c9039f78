"""Boxes in which the policy's work is judged: the files that cross into them, and two programs that converse."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Sequence
from typing import Protocol

from sparring.errors import SandboxError, refusal
from sparring.protocols import Sandbox
from sparring.types import ExecResult


class VerifyingBox(Sandbox, Protocol):
    """Box in which the policy's work is judged."""

    async def remove(self, path: str) -> None:
        """Remove a file, if it is there."""


class PolicyBox(Protocol):
    """Box of the policy."""

    async def read_plain(self, path: str, most_bytes: int) -> bytes:
        """Read a regular file that no link leads to."""


def checked_paths(paths: Sequence[str]) -> tuple[str, ...]:
    """Return the paths, each once.

    Raises:
        BadInput: they are a text, or one of them names no file or leads out of a folder on its way.
    """
    if isinstance(paths, (str, bytes)) or not isinstance(paths, Iterable):
        raise refusal("verifier", "a list of paths", repr(paths), f"write [{paths!r}]")
    paths = tuple(paths)
    for path in paths:
        parts = path.split("/") if isinstance(path, str) else [""]
        if not parts[-1] or "\0" in path or {".", ".."} & set(parts):
            raise refusal("verifier", "paths of files, without '.' and '..'", repr(path), "name each file")
    return tuple(dict.fromkeys(map(os.path.normpath, paths)))


async def verifier_of(judged: PolicyBox, verifier: VerifyingBox, paths: Sequence[str], most_bytes: int) -> VerifyingBox:
    """Write files of the policy's box into its verifier, remove there what is missing here, and return the verifier.

    Raises:
        SpoiltFile: a command left something else at a path, a file of more than `most_bytes`, or more than fits.
        SandboxError: a box failed.
    """
    try:
        for path in paths:
            try:
                data = await judged.read_plain(path, most_bytes)
            except FileNotFoundError:
                await verifier.remove(path)
            else:
                await verifier.write(path, data)
    except BaseException:
        await verifier.close()
        raise
    return verifier


class Conversing(Protocol):
    """Box of one of two programs that converse."""

    async def run_alone(self, code: str, limit_s: float) -> ExecResult:
        """Run Python code in an unused box for a caller that holds a slot."""

    def cancel(self) -> None:
        """End the running command."""

    def start_closing(self) -> object:
        """End the box, whether somebody waits or not."""

    async def close(self) -> None:
        """End the box."""


def pipes_between() -> tuple[tuple[int, int], tuple[int, int]]:
    """Return for each of two programs what it reads from and what it writes to.

    Raises:
        SandboxError: this process has too many open files.
    """
    first: tuple[int, ...] = ()
    try:
        questions, ask = first = os.pipe()
        answers, answer = os.pipe()
    except OSError as error:
        for file in first:
            os.close(file)
        raise SandboxError(f"sandbox: no pipes for two programs: {error}") from error
    return (answers, ask), (questions, answer)


async def conversation(
    asking: tuple[Conversing, str], answering: tuple[Conversing, str], limit_s: float, slots: asyncio.Semaphore
) -> ExecResult:
    """Run two programs, each in its box, and close the boxes.

    Args:
        asking: box and program, whose end ends the other one.
        answering: box and program that is asked.
        limit_s: time limit of the program that is asked; the other one has twice as much.
        slots: slots of the pool, of which both take one.

    Returns:
        result of the program that asks.
    """
    (judge, code), (judged, other) = asking, answering
    answer_task: asyncio.Task[ExecResult] | None = None
    try:
        async with slots:
            answer_task = asyncio.create_task(judged.run_alone(other, limit_s))
            result = await judge.run_alone(code, 2 * limit_s)
            if result.exit_code:  # the await below raises if the other box is the one that failed
                judged.cancel()
                await answer_task
            return result
    finally:
        for box in (judge, judged):  # before any wait, which a caller may give up
            box.start_closing()
        if answer_task is not None:
            answer_task.cancel()
            await asyncio.gather(answer_task, return_exceptions=True)
        await judge.close()
        await judged.close()
