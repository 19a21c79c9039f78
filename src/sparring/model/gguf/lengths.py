"""Validation of a GGUF file's head before the `gguf` package reads it. The package trusts the lengths in a file: an
array of 2^60 numbers, declared in a hundred bytes, fills the memory.

Source: the GGUF specification of the ggml project (docs/gguf.md), versions 2 and 3.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import BinaryIO

from sparring.errors import refusal

SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of a number or boolean, by type."""
TEXT, ARRAY = 8, 9
LONGEST_ARRAY = 1 << 23
"""Maximum number of elements of an array; the largest vocabularies have 2^18 tokens."""


def check_head(file: Path) -> None:
    """Refuse a file whose head declares an impossible length, count or type: BadInput, with the position in bytes.
    Raises OSError if the file cannot be read."""
    with file.open("rb") as stream:
        _Walk(stream, file.stat().st_size, str(file)).head()


class _Walk:
    """One pass over a head. Every read first checks the length of the file."""

    def __init__(self, stream: BinaryIO, size: int, where: str) -> None:
        self._stream, self._size, self._where = stream, size, where

    def head(self) -> None:
        magic, version = self._bytes(4), self._number("<I")
        if magic != b"GGUF":
            raise self._refusal("GGUF at its beginning", repr(magic))
        if version & 0xFFFF == 0:
            remedy = "convert it with gguf-convert-endian"
            raise refusal(self._where, "a GGUF file in this processor's byte order", "the other one", remedy)
        if version not in (2, 3):
            raise self._refusal("version 2 or 3", str(version))
        tensors, settings = self._number("<Q"), self._number("<Q")
        for _ in range(settings):
            self._text()
            self._value(self._number("<I"))
        for _ in range(tensors):
            self._text()
            dimensions = self._number("<I")
            if not 1 <= dimensions <= 4:
                raise self._refusal("a tensor of 1 to 4 dimensions", str(dimensions))
            if 0 in struct.unpack(f"<{dimensions}Q", self._bytes(8 * dimensions)):
                raise self._refusal("a tensor with elements", "a dimension of 0")
            self._bytes(12)  # type and place of its blocks

    def _value(self, kind: int) -> None:
        if kind == TEXT:
            self._text()
        elif kind == ARRAY:
            element, length = self._number("<I"), self._number("<Q")
            if length > LONGEST_ARRAY:
                raise self._refusal(f"an array of at most {LONGEST_ARRAY} elements", str(length))
            if element == TEXT:
                for _ in range(length):
                    self._text()
            else:
                self._skip(length * self._size_of(element))
        else:
            self._skip(self._size_of(kind))

    def _size_of(self, kind: int) -> int:
        if kind not in SIZES:
            raise self._refusal("the type of a number, or text", str(kind))
        return SIZES[kind]

    def _text(self) -> None:
        self._skip(self._number("<Q"))

    def _number(self, form: str) -> int:
        (number,) = struct.unpack(form, self._bytes(struct.calcsize(form)))
        return int(number)

    def _bytes(self, count: int) -> bytes:
        read = self._stream.read(count)
        if len(read) < count:
            raise self._refusal(f"{count} more bytes", "the file's end")
        return read

    def _skip(self, count: int) -> None:
        if count > self._size - self._stream.tell():
            raise self._refusal(f"{count} more bytes", "the file's end")
        self._stream.seek(count, 1)

    def _refusal(self, expected: str, given: str) -> Exception:
        place = f"a whole GGUF file: at byte {self._stream.tell()} {expected}"
        return refusal(self._where, place, given, "copy or download it again")
