"""Large allocations of CPU memory."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch

LARGE = 4 << 20
"""Minimum size, in bytes, of a tensor that asks for the system's large pages of 2 MiB. The first write to a large page
costs little more than to a small one."""


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Allocate zeros on the CPU, aligned to a cache line. A large tensor occupies memory only where it is written. It
    may be written in or outside torch's inference mode."""
    with torch.inference_mode(False):
        return _zeros(shape, dtype, math.prod(shape) * dtype.itemsize)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, size: int) -> torch.Tensor:
    if size < LARGE:
        return torch.zeros(shape, dtype=dtype)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def discard(tensors: Iterable[torch.Tensor]) -> None:
    """Return the memory of CPU tensors to the system. Their values are lost and their addresses stay, so that whatever
    points to them may write them again. Pieces smaller than a page of the system are kept. A tensor that is not
    contiguous is left alone. The system may refuse, as for locked memory (`OSError`)."""
    advise = _advise()
    for tensor in tensors:
        if tensor.is_contiguous():
            begin = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
            end = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
            if end > begin and advise(begin, end - begin, mmap.MADV_DONTNEED):
                number = ctypes.get_errno()
                raise OSError(number, os.strerror(number))


@cache
def _advise() -> Callable[[int, int, int], int]:
    advise = ctypes.CDLL(None, use_errno=True).madvise
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    function: Callable[[int, int, int], int] = advise
    return function


KEPT = 256 << 20
"""Minimum amount of freed memory, in bytes, that is returned to the system; for less, the C library's own rules are
cheaper."""


def give_back(least: int = KEPT) -> None:
    """Return freed memory that the C library still holds to the system, if there are at least `least` bytes.

    The C library keeps blocks below 32 MiB for the thread that freed them: gradients and activations, replaced weights.
    The next phase of a step, on another thread, cannot use them. New memory costs one page fault per page, which is
    little compared with work that needs so much.
    """
    freed, trim = _allocator()
    if trim is not None and freed() >= least:
        trim(0)


class _Counts(ctypes.Structure):
    """`struct mallinfo2` of glibc (mallinfo(3)); `fordblks` is the freed bytes of all threads."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    ]


@cache
def _allocator() -> tuple[Callable[[], int], Callable[[int], Any] | None]:
    """Return two functions of the C library: the first counts the freed bytes that it still holds, the second gives
    them back to the system. Without glibc 2.33 the first always counts 0 and the second is None."""
    library = ctypes.CDLL(None)
    try:
        counts, trim = library.mallinfo2, library.malloc_trim
    except AttributeError:  # no glibc, or one before 2.33
        return (lambda: 0), None
    counts.restype, trim.argtypes = _Counts, [ctypes.c_size_t]
    return (lambda: int(counts().fordblks)), trim
