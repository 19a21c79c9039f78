"""Limit of open files of this process: a connection needs one file, an event loop three.

Shells set a soft limit of 1,024, which only programs with `select` need, and let a process raise it to the hard limit.
"""

from __future__ import annotations

import resource

MOST = 1 << 16
"""Number of files to ask for: a run with a thousand agent programs has 48,000 connections."""


def allow_files(number: int = MOST) -> int:
    """Raise the soft limit of open files towards `number`, and return the limit reached."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = number if hard == resource.RLIM_INFINITY else min(number, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return number if soft == resource.RLIM_INFINITY else soft
