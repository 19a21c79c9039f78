"""Comparison of weight folders, tensor by tensor, from their safetensors files alone."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sparring.errors import refusal

TYPES = {
    "BOOL": "?",
    "U8": "<u1",
    "I8": "<i1",
    "U16": "<u2",
    "I16": "<i2",
    "U32": "<u4",
    "I32": "<i4",
    "U64": "<u8",
    "I64": "<i8",
    "F16": "<f2",
    "F32": "<f4",
    "F64": "<f8",
}
"""numpy's types by safetensors type, for the types that numpy supports."""

PIECE = 1 << 24
"""Bytes compared at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorDifference:
    """First difference between two sets of weights, in the order of tensor names.

    Attributes:
        what: `tensor`, `dtype`, `shape`, or `value at (row, column, ...)`.
        values: description of the tensor or value in the first and in the second folder; `none` if a folder lacks it.
    """

    tensor: str
    what: str
    values: tuple[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """Tensor in a safetensors file: the range [begin, end) of its bytes, and its dtype as the file's header names
    it."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    def content(self) -> np.ndarray[Any, Any]:
        """Map the tensor's bytes from the file."""
        if self.begin == self.end:
            return np.zeros(0, np.uint8)
        return np.memmap(self.file, np.uint8, "r", self.begin, (self.end - self.begin,))


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors file or folder by name, in the order of names. The mapping is empty if the
    folder does not exist. A damaged file is refused (`BadInput`)."""
    tensors: dict[str, StoredTensor] = {}
    for file in [path] if path.is_file() else sorted(path.glob("*.safetensors")):
        tensors |= _read_header(file)
    return dict(sorted(tensors.items()))


def _read_header(file: Path) -> dict[str, StoredTensor]:
    try:
        with file.open("rb") as data:
            start = 8 + int.from_bytes(data.read(8), "little")
            entries: Mapping[str, Any] = json.loads(data.read(start - 8) if start <= file.stat().st_size else b"")
        tensors = {
            name: StoredTensor(
                file=file,
                dtype=entry["dtype"],
                shape=tuple(entry["shape"]),
                begin=start + entry["data_offsets"][0],
                end=start + entry["data_offsets"][1],
            )
            for name, entry in entries.items()
            if name != "__metadata__"
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise refusal(str(file), "a safetensors file", f"{type(error).__name__}: {error}", "restore it") from error
    if any(tensor.end > file.stat().st_size for tensor in tensors.values()):
        raise refusal(str(file), "a whole safetensors file", "one that was cut", "restore it")
    return tensors


def first_tensor_difference(left: Path, right: Path) -> TensorDifference | None:
    """Return the first difference between two sets of weights, each a folder with safetensors files, such as a stage's
    `model`, or one file; None if all tensors are bitwise equal."""
    tensors, counterparts = stored_tensors(left), stored_tensors(right)
    for name in sorted(tensors.keys() | counterparts.keys()):
        first, second = tensors.get(name), counterparts.get(name)
        if first is None or second is None:
            values = tuple("none" if tensor is None else f"{tensor.dtype} {tensor.shape}" for tensor in (first, second))
            return TensorDifference(tensor=name, what="tensor", values=(values[0], values[1]))
        for what, pair in (("dtype", (first.dtype, second.dtype)), ("shape", (first.shape, second.shape))):
            if pair[0] != pair[1]:
                return TensorDifference(tensor=name, what=what, values=(str(pair[0]), str(pair[1])))
        at = _first_byte(first.content(), second.content())
        if at is not None:
            return _value_difference(name, first, second, at)
    return None


def _first_byte(left: np.ndarray[Any, Any], right: np.ndarray[Any, Any]) -> int | None:
    for begin in range(0, len(left), PIECE):
        differs = left[begin : begin + PIECE] != right[begin : begin + PIECE]
        if differs.any():
            return begin + int(differs.argmax())
    return None


def _value_difference(name: str, left: StoredTensor, right: StoredTensor, byte: int) -> TensorDifference:
    size = (left.end - left.begin) // max(1, int(np.prod(left.shape, dtype=np.int64)))
    place = byte // max(1, size)
    position: Sequence[int] = [int(at) for at in np.unravel_index(place, left.shape or (1,))]
    values = tuple(_value(tensor, tensor.content()[place * size : (place + 1) * size]) for tensor in (left, right))
    what = f"value at ({', '.join(map(str, position))})"
    return TensorDifference(tensor=name, what=what, values=(values[0], values[1]))


def _value(tensor: StoredTensor, content: np.ndarray[Any, Any]) -> str:
    """Format a tensor's value as a number with its bytes, since two different values may print as the same number."""
    data = content.tobytes()
    if tensor.dtype == "BF16":
        number = np.frombuffer(b"\0\0" + data, "<f4")[0]
    elif tensor.dtype in TYPES:
        number = np.frombuffer(data, TYPES[tensor.dtype])[0]
    else:
        return f"0x{data[::-1].hex()}"
    return f"{number} (0x{data[::-1].hex()})"
