"""The `[sandbox]` section of a recipe."""

from __future__ import annotations

import msgspec


class SandboxConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of boxes. What one box may use (time, memory, disk, ...) is the task's `BoxSpec`."""

    enabled: bool = True
    """False switches the tool host off: every command answers with an error text and exit code 1."""

    bwrap: str = "bwrap"
    """The bubblewrap program: a name on PATH or a path."""

    python: str = "auto"
    """The interpreter inside the boxes: an absolute path, or auto: the system's, else the one that runs Sparring."""

    servers: int = 0
    """Fork servers, each one a process that makes boxes. 0 = as many as there are CPUs."""

    concurrency: int = 0
    """Commands that run at the same time; later ones wait in order. 0 = twice the number of CPUs."""

    starting: int = 32
    """Boxes that may be starting at once; rollouts beyond them wait in the phase `box queue`, which has no limit."""

    grace_s: float = 30.0
    """Seconds that a box may take to answer after a command's own time limit; then it is given up as broken."""

    def __post_init__(self) -> None:
        if self.servers < 0 or self.concurrency < 0:
            raise ValueError("servers and concurrency must be 0 (by CPU count) or more")
        if self.starting < 1:
            raise ValueError("starting must be at least 1")
        if self.grace_s <= 0:
            raise ValueError("grace_s must be more than 0")
        if self.python != "auto" and not self.python.startswith("/"):
            raise ValueError(f"python must be 'auto' or an absolute path, not {self.python!r}")
