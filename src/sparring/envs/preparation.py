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
        snapshot: snapshot of the box after `Env.prepare`, before the world's `open`; None if `prepare` did not run.
    """

    def __init__(self, kept: Snapshot | None = None) -> None:
        self._kept = kept
        self.is_fork = False
        self.snapshot: Snapshot | None = None

    async def take(self, pool: Boxes, spec: BoxSpec) -> Sandbox:
        """Return the attempt's box: a fork of `kept`, or an unused box if there is no `kept` or the fork fails."""
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
        """Run the world's `prepare` on the box, through `call`, and keep a snapshot of the result. Do nothing if the
        box is a fork, or the world does not override `prepare`."""
        steps = getattr(type(env), "prepare", None)
        if self.is_fork or steps is None or steps is Env.prepare:
            return
        await call(env.prepare, task, BoxAtHome(box))  # type: ignore[union-attr]  # not every world has one
        # snapshots that the world made meanwhile are not what it leaves
        freeze: Callable[[], Awaitable[Snapshot]] = getattr(box, "snapshot_prepared", box.snapshot)
        self.snapshot = await freeze()
