"""The `[sandbox]` section of a recipe."""

from __future__ import annotations

import msgspec

BOX_USER = 65530
"""Id that boxes run as by default. Distributions and systemd assign no id from 65520 to 65533."""
OVERFLOW_USER = 65534
"""Id of `nobody`, which the kernel, NFS and daemons use for owners without an id."""


class SandboxConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the sandbox. The limits of one box (time, memory, disk, ...) are in the task's `BoxSpec`."""

    enabled: bool = True
    """Run commands of the policy. If false, every command answers with an error text and exit code 1."""

    kind: str = "bubblewrap"
    """Backend of the boxes: bubblewrap, or package.module:factory. A factory gets this section and the mounts of agent
    programs (or None), and returns your own pool, which passes the contract suite (docs/sandbox.md)."""

    bwrap: str = "bwrap"
    """Path or name on PATH of bubblewrap."""

    python: str = "auto"
    """Absolute path of the interpreter in the boxes; auto: the system's, or else the one that runs Sparring."""

    user: int = BOX_USER
    """If Sparring runs as root: user and group id on the host that boxes run as. No account and no other process may
    have this id. Layers of images belong to it (sparring image pull --user)."""

    servers: int = 0
    """Number of fork servers, processes that start boxes. 0: one per CPU."""

    concurrency: int = 0
    """Maximum number of concurrent commands; later ones wait in order. 0: two per CPU."""

    starting: int = 32
    """Maximum number of boxes that start at the same time; further rollouts wait in the phase `box queue`, which has no
    time limit."""

    grace_s: float = 30.0
    """Seconds that a box may take to answer after its command's time limit, before it counts as failed."""

    def __post_init__(self) -> None:
        if self.servers < 0 or self.concurrency < 0:
            raise ValueError("servers and concurrency must be 0 (by CPU count) or more")
        if not 1 <= self.user < 2**32 - 1 or self.user == OVERFLOW_USER:
            raise ValueError(f"user must be an id that nobody has, not {self.user}")
        if self.starting < 1:
            raise ValueError("starting must be at least 1")
        if self.kind != "bubblewrap" and not all(self.kind.partition(":")[::2]):
            raise ValueError(f"kind must be 'bubblewrap' or package.module:factory, not {self.kind!r}")
        if self.grace_s <= 0:
            raise ValueError("grace_s must be more than 0")
        if self.python != "auto" and not self.python.startswith("/"):
            raise ValueError(f"python must be 'auto' or an absolute path, not {self.python!r}")
