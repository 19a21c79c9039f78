"""Settings of the C library's allocator for a process that trains."""

from __future__ import annotations

import ctypes

M_ARENA_MAX = -8
"""Parameter of glibc's mallopt(3): the maximum number of arenas."""


def share_freed_memory() -> None:
    """Let all threads allocate from one arena, so that memory freed in one phase (a micro-batch, an update, a
    generation step) serves the next one on whatever thread, with its pages already mapped. Call it before starting
    threads.

    By default each thread keeps freed memory in an arena of its own. Other C libraries than glibc are unaffected.
    """
    try:
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)
    except AttributeError:
        return
