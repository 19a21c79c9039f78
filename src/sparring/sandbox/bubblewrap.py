"""Boxes made by bubblewrap fork servers, in a few milliseconds each and without a daemon. `inner.boxes` describes the
mechanism, docs/sandbox.md what is isolated."""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import Mapping
from functools import partial
from itertools import chain
from typing import Literal

from sparring.errors import SandboxError, refusal
from sparring.protocols import Sandbox
from sparring.sandbox.box import BubblewrapBox
from sparring.sandbox.commands import BoxCommands
from sparring.sandbox.config import SandboxConfig
from sparring.sandbox.groups import BoxGroups, Hierarchy, hierarchy_of_this_process
from sparring.sandbox.images.layer_holds import HeldLayers
from sparring.sandbox.mounts import outermost
from sparring.sandbox.off_box import OffBox
from sparring.sandbox.requests import check_file_size, check_open_files
from sparring.sandbox.roots import ImageOf, Root, root_of, stored_image
from sparring.sandbox.server import Server
from sparring.sandbox.snapshots import LayeredSnapshot
from sparring.types import BoxSpec


class BubblewrapBoxes:
    """Pool of boxes for one event loop. Servers start with the first command, so creating a pool costs nothing.
    Implements `Boxes`. Implements `BoxPool`.

    Args:
        config: `[sandbox]`.
        mounts: files and folders of the host that programs need, by their path in the boxes; None: the boxes run no
            programs.
        image_of: function from an image's name to the unpacked image; None: pulled images are used.
        hierarchy: where control groups of boxes are made; None: the boxes have no control groups.
    """

    def __init__(
        self,
        config: SandboxConfig,
        mounts: Mapping[str, str] | None = None,
        image_of: ImageOf | None = None,
        *,
        hierarchy: Hierarchy | Literal["found"] | None = "found",
    ) -> None:
        cpus = len(os.sched_getaffinity(0))
        self._config = config
        self.runs_programs = mounts is not None
        self._mounts = mounts
        self.program_paths = list(outermost(mounts or {}))
        self.image_of = image_of or partial(stored_image, user=config.user)
        self._servers: dict[tuple[object, ...], list[Server]] = {}
        self._num_servers = config.servers or cpus
        self.slots = asyncio.Semaphore(config.concurrency or 2 * cpus)
        self.grace_s = config.grace_s
        self.groups = BoxGroups(hierarchy_of_this_process() if hierarchy == "found" else hierarchy)
        self._held = HeldLayers()
        self._num_boxes = 0
        self._open: weakref.WeakSet[BubblewrapBox] = weakref.WeakSet()
        self._closed = False

    async def take(self, spec: BoxSpec) -> Sandbox:
        """Return a new box, which the caller closes. Its first command starts its processes.

        Raises:
            BadInput: the image does not exist; the spec asks for a network, which these boxes lack; or this process may
                open too few files.
            SandboxError: the pool is closed.
        """
        if spec.network:
            raise refusal(
                "box.network", "false", "true", "bubblewrap boxes have no network; use another kind of sandbox"
            )
        check_file_size(spec)
        root = root_of(spec, self.image_of, self._held, self._config.user)
        if not self._config.enabled:
            return OffBox()
        check_open_files()
        return self.made(spec, root)

    def made(
        self, spec: BoxSpec, root: Root, joined: tuple[int, ...] = (), below: LayeredSnapshot | None = None
    ) -> BubblewrapBox:
        if self._closed:
            raise SandboxError("sandbox: the pool is closed")
        kind = (root.kind == "host", *root.folders)
        if kind not in self._servers:
            self._servers[kind] = [Server(self._config, self._mounts, root) for _ in range(self._num_servers)]
        server = self._servers[kind][self._num_boxes % self._num_servers]
        self._num_boxes += 1
        box = BubblewrapBox(self, root, BoxCommands(self, spec, root, server, joined, below))
        self._open.add(box)
        return box

    async def close(self) -> None:
        self._closed = True
        for box in list(self._open):
            await box.close()
        for server in chain.from_iterable(self._servers.values()):
            server.close()
        await self.groups.close()
        self._held.close()
