"""Layout of named tensors in one block of bytes: a file, or the body of a request."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import torch

from sparring.errors import WeightsError, boundary
from sparring.weights.upload import ALIGNMENT


class TensorSpan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Position of one tensor in the block: `offset` in bytes; `dtype` is torch's name, such as "float32"."""

    dtype: str
    shape: tuple[int, ...]
    offset: int


def layout(state: Mapping[str, torch.Tensor]) -> tuple[int, dict[str, TensorSpan]]:
    """Return the size of the block in bytes, and the position of each tensor in it."""
    spans, offset = {}, 0
    for name, tensor in state.items():
        spans[name] = TensorSpan(
            dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape), offset=offset
        )
        offset += -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT
    return offset, spans


def content(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor, which share its storage if it is contiguous and on the CPU."""
    return memoryview(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def pieces(state: Mapping[str, torch.Tensor], most: int) -> Iterator[list[memoryview]]:
    """Yield the bytes of the block in order, as lists of at most `most` bytes each, without copying them."""
    piece, room = list[memoryview](), most
    for tensor in state.values():
        data = content(tensor)
        for part in (data, memoryview(bytes(-len(data) % ALIGNMENT))):
            while part:
                piece.append(part[:room])
                part, room = part[room:], room - len(piece[-1])
                if not room:
                    yield piece
                    piece, room = [], most
    if piece:
        yield piece


def unpacked(data: torch.Tensor, spans: Mapping[str, TensorSpan], where: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a block `data`, uint8 [size]. They share its storage. Raises WeightsError for a position
    outside the block and an unknown dtype."""
    with boundary(WeightsError, where, "tensors within their block", "publish them again"):
        return {name: _view(data, span) for name, span in spans.items()}


def _view(data: torch.Tensor, span: TensorSpan) -> torch.Tensor:
    dtype: Any = getattr(torch, span.dtype)
    end = span.offset + math.prod(span.shape) * dtype.itemsize
    if not 0 <= span.offset <= end <= len(data):
        raise ValueError(f"bytes {span.offset} to {end} of {len(data)}")
    return data[span.offset : end].view(dtype).reshape(span.shape)
