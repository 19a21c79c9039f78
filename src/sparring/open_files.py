"""Limit of the files that this process may have open: each connection is one, and each event loop has three.

Shells give a process 1,024, a limit that only programs of `select` need, and let it raise that up to another one.
"""

from __future__ import annotations

import resource

MOST = 1 << 16
"""Files that are asked for: a run with a thousand agent programs has 48,000 connections."""


def allow_files(number: int = MOST) -> int:
    """Raise this process's limit of open files to a number, as far as it may. Return how many it may have then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = number if hard == resource.RLIM_INFINITY else min(number, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return number if soft == resource.RLIM_INFINITY else soft
