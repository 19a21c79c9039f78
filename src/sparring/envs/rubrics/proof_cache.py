"""Cache of rows that passed `prove`, by digest, so that thousands of programs and formulas do not run at every
start."""

from __future__ import annotations

import functools
import os
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import xxhash

AT_LEAST = 500
"""Smallest number of new proofs that is written to the file: a smaller number is faster to prove again."""


def of_user() -> Proven:
    """Return the cache in the user's cache folder (`XDG_CACHE_HOME`, `~/.cache`)."""
    folder = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Proven(Path(folder) / "sparring" / "proven-rows" if Path(folder).is_absolute() else None)


def digest(part: Any, row: Any, box: Any) -> str:
    """Return the key of a proof: a digest of the part's settings, the row, its box, and this package's code."""
    content = msgspec.json.encode((part, row, box), order="sorted", enc_hook=repr)
    return xxhash.xxh3_64_hexdigest(_code() + content)


class Proven:
    """Set of digests, kept in a file once there are many. An unreadable or unwritable file is ignored.

    Args:
        file: file with one digest per line; None: keep nothing.
    """

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._rows: set[str] | None = None
        self._new: list[str] = []

    def __contains__(self, row: str) -> bool:
        """Return True if the row passed before."""
        if self._rows is None:
            self._rows = set()
            with suppress(OSError, ValueError):
                self._rows = set(self._file.read_text(encoding="ascii").split()) if self._file is not None else set()
        return row in self._rows

    def add(self, row: str) -> None:
        """Record that a row passed."""
        if row not in self:
            assert self._rows is not None, "looked up above"
            self._rows.add(row)
            self._new.append(row)
        if self._file is None or len(self._new) < AT_LEAST:
            return
        with suppress(OSError, ValueError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with self._file.open("a", encoding="ascii") as file:
                file.write("".join(f"{each}\n" for each in self._new))
        self._new.clear()


@functools.cache
def _code() -> bytes:
    """Return a digest of the code that proves rows, since its verdicts may change with it."""
    here = Path(__file__).parent
    files = [*here.glob("*.py"), *(here.parents[1] / "sandbox").glob("*.py")]
    text = b"".join(file.read_bytes() for file in sorted(files))
    return xxhash.xxh3_128_digest(text + version("math-verify").encode())
