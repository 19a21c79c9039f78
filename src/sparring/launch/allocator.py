"""The C library's allocator, as a process that trains wants it."""

from __future__ import annotations

import ctypes

M_ARENA_MAX = -8
"""Parameter of glibc's mallopt(3): the most pools that threads allocate from."""


def share_freed_memory() -> None:
    """Let all threads allocate from one pool: what a micro-batch, an update or a step of generation has freed, the next
    phase takes, whichever thread computes it, with pages that are there already. A thread that has allocated before the
    call keeps the pool that it has.

    By default each thread has a pool of its own and keeps what is freed in it. Where the C library is another than
    glibc nothing changes.
    """
    try:
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)
    except AttributeError:
        return
