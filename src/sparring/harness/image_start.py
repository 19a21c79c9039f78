"""Check, before a run, that an agent program starts in an image. A refusal quotes the error of the program's loader."""

from __future__ import annotations

import asyncio
import shlex
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from sparring.errors import refusal
from sparring.protocols import Boxes
from sparring.sandbox.roots import HOST_IMAGES
from sparring.types import BoxSpec, ExecResult

ASKED = "--version"
"""Argument that makes a program print its version and exit."""
PATIENCE_S = 20.0
OUTPUT_BYTES = 2000
NOT_STARTED = (126, 127)
"""Exit statuses of a program that cannot be started, or whose libraries are missing."""
HOST_IMAGE = HOST_IMAGES[0]


async def check_starts(
    name: str,
    boxes: Boxes,
    spec: BoxSpec,
    lines: tuple[Sequence[str], Sequence[str]],
    environment: Mapping[str, str],
    port: int,
) -> None:
    """Start a program in a box with an image. Refuse the image if the program does not start there, or if it fails
    there but runs in a box of the host's programs.

    Args:
        lines: beginnings of the program's command: in the image, and in boxes of the host's programs.
        port: port of the box's server, which accepts no connection.

    Raises:
        BadInput: the program does not run in the image.
    """
    in_image, on_host = ((*line, ASKED) for line in lines)
    expected = f"an image in which the program of {name} runs"
    try:
        said = await _run(boxes, spec, in_image, environment, port)
    except OSError as error:
        do = "do: remove from the image what lies where the program's files are shown"
        raise refusal("box.image", expected, f"{spec.image!r}: {error}", do) from error
    if said is None or said.exit_code == 0 or said.timed_out:
        return
    if said.exit_code not in NOT_STARTED:
        beside = await _run(boxes, replace(spec, image=HOST_IMAGE), on_host, environment, port)
        if beside is None or beside.exit_code:
            return  # it says so wherever it runs
    words = (said.stderr.strip() or said.stdout.strip())[-OUTPUT_BYTES:]
    got = f"{spec.image!r}, where `{shlex.join(in_image)}` ended with status {said.exit_code}: {words}"
    do = "do: add to the image what is missing (an interpreter, the C library that it was built for)"
    raise refusal("box.image", expected, got, do)


async def _run(
    boxes: Boxes, spec: BoxSpec, argv: Sequence[str], environment: Mapping[str, str], port: int
) -> ExecResult | None:
    """Run a program in a box of its own and return its result; None if the boxes run no programs."""
    box: Any = await boxes.take(spec)
    try:
        if not hasattr(box, "program"):
            return None
        result: ExecResult = await box.program(
            argv,
            environment=environment,
            port=port,
            timeout_s=PATIENCE_S,
            output_bytes=OUTPUT_BYTES,
            served=_silent,
        )
        return result
    finally:
        await box.close()


async def _silent(listening: socket.socket) -> None:
    """Hold a listening socket without accepting a connection."""
    with listening:
        await asyncio.Event().wait()
