"""Boxes in which the policy's work is judged: files copied into them, and two programs connected by pipes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Sequence

from sparring.errors import SandboxError, refusal
from sparring.sandbox.commands import BoxCommands
from sparring.sandbox.files import FileAccess
from sparring.sandbox.image_python import python_request
from sparring.sandbox.requests import bounds_of
from sparring.types import ExecResult


def checked_paths(paths: Sequence[str]) -> tuple[str, ...]:
    """Return the paths, each once.

    Raises:
        BadInput: `paths` is no list of paths, or a path names no file or contains '.' or '..'.
    """
    if isinstance(paths, (str, bytes)) or not isinstance(paths, Iterable):
        raise refusal("verifier", "a list of paths", repr(paths), f"write [{paths!r}]")
    paths = tuple(paths)
    for path in paths:
        parts = path.split("/") if isinstance(path, str) else [""]
        if not parts[-1] or "\0" in path or {".", ".."} & set(parts):
            raise refusal("verifier", "paths of files, without '.' and '..'", repr(path), "name each file")
    return tuple(dict.fromkeys(map(os.path.normpath, paths)))


async def carry(judged: FileAccess, verifier: FileAccess, paths: Sequence[str], most_bytes: int) -> None:
    """Write files of the policy's box into its verifier, and remove there the files that are missing here.

    Raises:
        SpoiltFile: a command left no regular file at a path, one of more than `most_bytes`, or more than fits.
        SandboxError: a box failed.
    """
    for path in paths:
        try:
            data = await judged.read_plain(path, most_bytes)
        except FileNotFoundError:
            await verifier.remove(path)
        else:
            await verifier.write(path, data)


def pipes_between() -> tuple[tuple[int, int], tuple[int, int]]:
    """Return for each of two programs the pipe ends that it reads from and writes to.

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
    asking: tuple[BoxCommands, str], answering: tuple[BoxCommands, str], in_image: bool, slots: asyncio.Semaphore
) -> ExecResult:
    """Run two programs, each in its box, and close the boxes.

    Args:
        asking: commands of a box, and the program that asks, with twice the spec's time limit. Its end ends the other.
        answering: commands of a box, and the program that answers.
        in_image: whether the boxes are of an image with a Python of its own.
        slots: slots of the pool, of which both take one.

    Returns:
        result of the program that asks.
    """
    (judge, code), (judged, other) = asking, answering
    answer_task: asyncio.Task[ExecResult] | None = None
    bounds = bounds_of(judge.spec, None, None)
    request = python_request(in_image, bounds)
    longer = {**request, "timeout": 2 * bounds["timeout"]}
    try:
        async with slots:
            answer_task = asyncio.create_task(judged.run_alone(request, other))
            result = await judge.run_alone(longer, code)
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
