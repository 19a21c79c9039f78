"""Large blocks of this machine's memory."""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Callable
from functools import cache
from typing import Any

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


KEPT = 256 << 20
"""Bytes of freed memory from which on the system gets it back; below, the C library's own rules are cheaper."""


def give_back(least: int = KEPT) -> None:
    """Let the system have what was freed and is still held, if that is at least so many bytes.

    The C library keeps what a thread frees in pieces below 32 MiB, for that thread: gradients and activations, weights
    that were exchanged. The next phase of a step, on another thread, cannot use it. To take memory anew costs a fault
    each page; that is little beside work which takes this much.
    """
    freed, trim = _allocator()
    if trim is not None and freed() >= least:
        trim(0)


class _Counts(ctypes.Structure):
    """`struct mallinfo2` of glibc (mallinfo(3)); `fordblks` has the freed bytes of all threads."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    ]


@cache
def _allocator() -> tuple[Callable[[], int], Callable[[int], Any] | None]:
    """Return what counts freed bytes and what gives them back; None for the latter where the C library has neither."""
    library = ctypes.CDLL(None)
    try:
        counts, trim = library.mallinfo2, library.malloc_trim
    except AttributeError:  # another library than glibc, or one before 2.33
        return (lambda: 0), None
    counts.restype, trim.argtypes = _Counts, [ctypes.c_size_t]
    return (lambda: int(counts().fordblks)), trim
