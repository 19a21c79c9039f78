"""What a caller asks of a box: refused before anything starts, where no box could do it."""

from __future__ import annotations

import math
import resource
from collections.abc import Mapping, Sequence
from typing import Any

from sparring.disk import megabytes
from sparring.errors import refusal
from sparring.open_files import allow_files
from sparring.types import BoxSpec

MOST_S = 1e8
"""Longest time limit, in seconds: three years."""
LEAST_FILES = 512
"""Least limit of open files: a box's own process holds 6 for each of 64 commands, or two for each of 200 layers."""
MOST_SPEC_BYTES, MOST_PROCESSES = 1 << 50, 1 << 22


def check_spec(spec: BoxSpec) -> None:
    """Refuse a spec whose limits are none.

    Raises:
        BadInput: a limit is no number, or none that a kernel takes, or above what this process may give a box.
    """
    check_seconds("box.timeout_s", spec.timeout_s)
    check_text("box.image", spec.image)
    for name, least in (("memory_bytes", 1), ("disk_bytes", 1), ("output_bytes", 0)):
        check_count(f"box.{name}", getattr(spec, name), least, MOST_SPEC_BYTES)
    check_count("box.processes", spec.processes, 1, MOST_PROCESSES)
    most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    if most != resource.RLIM_INFINITY and most < spec.disk_bytes:
        expected = f"files of {megabytes(spec.disk_bytes)}"
        do = "do: raise ulimit -f before the run, or lower disk_bytes"
        raise refusal("box.disk_bytes", expected, f"a limit of {megabytes(most)} for each file", do)


def check_seconds(where: str, value: object) -> None:
    """Refuse a time limit that is none.

    Raises:
        BadInput: it is not a number from 0 to `MOST_S`.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= MOST_S:
        raise refusal(where, f"seconds, from 0 to {MOST_S:.0f}", repr(value), "write a number")


def check_count(where: str, value: object, least: int = 0, most: float = math.inf) -> None:
    """Refuse what is no whole number of this range.

    Raises:
        BadInput: it is something else.
    """
    if type(value) is not int or not least <= value <= most:
        expected = f"a whole number of {least} or more" if most == math.inf else f"{least} to {most}"
        raise refusal(where, expected, repr(value), "write such a number")


def check_open_files() -> None:
    """Refuse a limit of open files below what a box itself may need.

    Raises:
        BadInput: this process may open fewer than `LEAST_FILES`.
    """
    if (most := allow_files()) < LEAST_FILES:
        do = f"do: ulimit -n {LEAST_FILES} (or more) before the run; systemd and containers have limits of their own"
        raise refusal("sandbox", f"a hard limit of {LEAST_FILES} open files or more", str(most), do)


def placed(
    argv: Sequence[str] | str, cwd: str | None = None, environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return what a request says of a command's line, folder and variables.

    Raises:
        BadInput: one of them is no text, or a variable's name or value cannot be one.
    """
    line = ["/bin/sh", "-c", argv] if isinstance(argv, str) else argv
    if isinstance(line, bytes) or not all(isinstance(word, str) for word in line):
        raise refusal("argv", "a text of sh, or a list of texts", repr(argv)[:200], "write str(...) around each")
    request: dict[str, Any] = {"argv": list(line)}
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
    """Return what a program gets as input.

    Raises:
        BadInput: it is neither text nor bytes.
    """
    if isinstance(text, str):
        return text.encode("utf-8", "surrogatepass")
    check_bytes("input", text)
    return text


def check_bytes(where: str, data: object) -> None:
    """Refuse what is no content of a file.

    Raises:
        BadInput: it is no bytes.
    """
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise refusal(where, "bytes", f"a {type(data).__name__}", "encode a text: text.encode()")


def check_text(where: str, value: object) -> None:
    """Refuse what is no text.

    Raises:
        BadInput: it is something else.
    """
    if not isinstance(value, str):
        raise refusal(where, "a text", repr(value)[:200], "write str(...) around it, or decode bytes")
