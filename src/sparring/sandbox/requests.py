"""Requests to boxes, checked before anything starts: a request that no box could fulfil is refused."""

from __future__ import annotations

import resource
from collections.abc import Mapping, Sequence
from typing import Any

from sparring.disk import megabytes
from sparring.errors import refusal
from sparring.open_files import allow_files
from sparring.protocols import Command, LiveCommand, Placement
from sparring.types import BoxSpec
from sparring.types.boxes import check_count, check_seconds

MOST_S = 1e8
"""Longest time limit, in seconds: three years."""
LIVE: Mapping[str, Any] = {"start": LiveCommand, "shell": Placement, "terminal": Placement}
"""Operations that start a long-running command, with the keywords that they accept."""
LEAST_FILES = 512
"""Least limit of open files: a box's own process holds 6 for each of 64 commands, or two for each of 200 layers."""


def check_file_size(spec: BoxSpec) -> None:
    """Refuse a box with larger files than this process may have.

    Raises:
        BadInput: `disk_bytes` is above the limit of this process.
    """
    most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    if most != resource.RLIM_INFINITY and most < spec.disk_bytes:
        expected = f"files of {megabytes(spec.disk_bytes)}"
        remedy = "do: raise ulimit -f before the run, or lower disk_bytes"
        raise refusal("box.disk_bytes", expected, f"a limit of {megabytes(most)} for each file", remedy)


def check_open_files() -> None:
    """Refuse a limit of open files below what a box itself may need.

    Raises:
        BadInput: this process may open fewer than `LEAST_FILES`.
    """
    if (most := allow_files()) < LEAST_FILES:
        remedy = (
            f"do: ulimit -n {LEAST_FILES} (or more) before the run; systemd and containers have limits of their own"
        )
        raise refusal("sandbox", f"a hard limit of {LEAST_FILES} open files or more", str(most), remedy)


def bounds_of(spec: BoxSpec, timeout_s: float | None, output_bytes: int | None) -> dict[str, Any]:
    """Return a request's limits of time and output bytes; None stands for the box's own limit.

    Raises:
        BadInput: a limit is not a valid number.
    """
    if timeout_s is not None:
        check_seconds("timeout_s", timeout_s, 0, MOST_S)
    if output_bytes is not None:
        check_count("output_bytes", output_bytes)
    return {
        "timeout": spec.timeout_s if timeout_s is None else timeout_s,
        "output": spec.output_bytes if output_bytes is None else output_bytes,
    }


def request_of(op: str, spec: BoxSpec, argv: Sequence[str] | str, command: Mapping[str, Any]) -> dict[str, Any]:
    """Return the request to a box that runs a command.

    Args:
        command: keywords of `protocols.Command`. The box's time limit does not apply to operations in `LIVE`.

    Raises:
        BadInput: an argument is not a text, or a variable or a limit is invalid.
        TypeError: a keyword is unknown.
    """
    known = LIVE.get(op, Command).__optional_keys__
    if unknown := command.keys() - known:
        raise TypeError(f"{op} got an unexpected keyword {min(unknown)!r}; it has {', '.join(sorted(known))}")
    line = ["/bin/sh", "-c", argv] if isinstance(argv, str) else argv
    if isinstance(line, bytes) or not all(isinstance(word, str) for word in line):
        raise refusal("argv", "a text of sh, or a list of texts", repr(argv)[:200], "write str(...) around each")
    timeout_s, cwd, environment = command.get("timeout_s"), command.get("cwd"), command.get("environment")
    request = {"op": op, "argv": list(line), **bounds_of(spec, timeout_s, command.get("output_bytes"))}
    if op in LIVE:
        request |= {"kept": True, "timeout": timeout_s}
    if cwd is not None:
        check_text("cwd", cwd)
        request["cwd"] = cwd
    if environment is not None:
        for name, value in environment.items():
            _check_variable(name, value)
        request["environment"] = dict(environment)
    return request


def _check_variable(name: object, value: object) -> None:
    texts = isinstance(name, str) and isinstance(value, str) and is_passable(name) and is_passable(value)
    if not texts or name == "" or "=" in str(name):
        expected = "variables: names without '=', and texts without NUL"
        raise refusal("environment", expected, f"{name!r}: {value!r}"[:200], "leave it out")


def is_passable(text: str) -> bool:
    """Return whether a program can get a text as an argument or a variable: UTF-8, or bytes as `os.fsdecode` gives
    them, without NUL."""
    try:
        return b"\0" not in text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return False


def as_bytes(text: str | bytes) -> bytes:
    """Return a program's input as bytes.

    Raises:
        BadInput: the input is neither text nor bytes.
    """
    if isinstance(text, str):
        return text.encode("utf-8", "surrogatepass")
    check_bytes("input", text)
    return text


def check_bytes(where: str, data: object) -> None:
    """Refuse a file's content that is not bytes.

    Raises:
        BadInput: `data` is not bytes.
    """
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise refusal(where, "bytes", f"a {type(data).__name__}", "encode a text: text.encode()")


def check_text(where: str, value: object) -> None:
    """Refuse a value that is not a text.

    Raises:
        BadInput: `value` is not a text.
    """
    if not isinstance(value, str):
        raise refusal(where, "a text", repr(value)[:200], "write str(...) around it, or decode bytes")
