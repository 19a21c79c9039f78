"""Preparation of a rollout's box by its world, once for an attempt and the retry after it (design 10)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from sparring.envs.base import Env
from sparring.envs.box_at_home import BoxAtHome
from sparring.errors import BadInput, SandboxError
from sparring.protocols import AnyEnv, Boxes, Sandbox, Snapshot
from sparring.types import BoxSpec, Task


class Preparation:
    """Preparation of one attempt's box: by its world (`Env.prepare`), or by the attempt before, from whose snapshot the
    box is forked.

    Args:
        kept: snapshot of the attempt before; None: the world prepares the box.

    Attributes:
        is_fork: whether the box is a fork of `kept`.
        snapshot: state in which this attempt's world has left the box, before its `open`; None if it prepared none.
    """

    def __init__(self, kept: Snapshot | None = None) -> None:
        self._kept = kept
        self.is_fork = False
        self.snapshot: Snapshot | None = None

    async def take(self, pool: Boxes, spec: BoxSpec) -> Sandbox:
        """Return the attempt's box. A snapshot that no box can be forked from is as if it were not there."""
        box = await pool.take(spec)
        if self._kept is None:
            return box
        try:
            fork = await box.fork(self._kept)
        except (BadInput, SandboxError):
            return box
        await box.close()
        self.is_fork = True
        return fork

    async def prepare(self, env: AnyEnv, task: Task, box: Sandbox, call: Callable[..., Awaitable[Any]]) -> None:
        """Let the world prepare a box that is no fork, if it does so at all, and keep the box's state. `call` calls a
        method of the world with arguments."""
        steps = getattr(type(env), "prepare", None)
        if self.is_fork or steps is None or steps is Env.prepare:
            return
        await call(env.prepare, task, BoxAtHome(box))  # type: ignore[union-attr]  # not every world has one
        # snapshots that the world made meanwhile are not what it leaves
        freeze: Callable[[], Awaitable[Snapshot]] = getattr(box, "snapshot_prepared", box.snapshot)
        self.snapshot = await freeze()
