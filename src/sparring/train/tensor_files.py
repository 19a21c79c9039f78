"""Safetensors files written and verified one tensor at a time, so that not all tensors are in memory at once."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import safe_open

from sparring.weights.checksum import checksum
from sparring.weights.layout import content

DTYPES: Mapping[torch.dtype, str] = MappingProxyType(
    {
        torch.float64: "F64",
        torch.float32: "F32",
        torch.bfloat16: "BF16",
        torch.float16: "F16",
        torch.int64: "I64",
        torch.int32: "I32",
        torch.int8: "I8",
        torch.uint8: "U8",
        torch.bool: "BOOL",
    }
)
"""Names of dtypes in a file (safetensors' format, version 0.4)."""


def write(path: Path, state: Mapping[str, torch.Tensor], tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Write a file of `tensors`, in any order; `state` has their names, dtypes and shapes. Return their checksum."""
    header, end, begins = dict[str, Any](), 0, dict[str, int]()
    for name, like in sorted(state.items(), key=lambda item: (-item[1].element_size(), item[0])):  # so all are aligned
        begins[name], end = end, end + like.nbytes
        header[name] = {"dtype": DTYPES[like.dtype], "shape": list(like.shape), "data_offsets": [begins[name], end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        start = file.tell()
        for name, tensor in tensors:
            file.seek(start + begins[name])
            file.write(content(tensor))
    with safe_open(path, "pt") as written:
        return checksum(_Read(written))


class _Read(Mapping[str, torch.Tensor]):
    """Tensors of an open file by name; a tensor is read when it is looked up."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._file.get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._file.keys())

    def __len__(self) -> int:
        return len(self._file.keys())
