"""Settings of the C library's allocator for a process that trains."""

from __future__ import annotations

import ctypes

M_ARENA_MAX = -8
"""Parameter of glibc's mallopt(3): the maximum number of arenas."""


def share_freed_memory() -> None:
    """Let all threads allocate from one pool. Memory that a micro-batch, an update or a generation step has freed,
    whose pages are mapped already, is then reused by the next phase in any thread. A thread that has allocated before
    the call keeps the pool that it has.

    By default each thread keeps freed memory in an arena of its own. Other C libraries than glibc are unaffected.
    """
    try:
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)
    except AttributeError:
        return
