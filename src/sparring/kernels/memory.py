"""Large blocks of this machine's memory."""

from __future__ import annotations

import math
import mmap

import torch

LARGE = 4 << 20
"""Bytes from which on the system's large pages, of 2 MiB, pay: a first write to one costs little more than to a small
one."""


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Allocate zeros on the CPU, at the beginning of a cache line. A large tensor takes memory only where it is
    written. It may be written whether or not it was made in torch's inference mode."""
    with torch.inference_mode(False):
        return _zeros(shape, dtype, math.prod(shape) * dtype.itemsize)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, size: int) -> torch.Tensor:
    if size < LARGE:
        return torch.zeros(shape, dtype=dtype)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
