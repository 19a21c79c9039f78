"""Snapshots of boxes: frozen layers of files, held by descriptors alone. `inner.root` describes the mechanism."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from sparring.errors import SandboxError, refusal
from sparring.sandbox.roots import Root
from sparring.types import BoxSpec

MOST_LAYERS = 200
"""Maximum number of snapshots on top of each other. The kernel passes 253 descriptors at once."""


class FrozenLayer:
    """Frozen layer of a box, kept as long as an object refers to it.

    A new box over the layer uses the descriptor up and gives a new one back, so boxes are made one at a time.

    Args:
        file: descriptor of its mount, which this object closes.
    """

    def __init__(self, file: int) -> None:
        self._file = file
        self._turn = asyncio.Lock()

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Free the files, unless a box lies over them."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    @asynccontextmanager
    async def lent(self) -> AsyncIterator[int]:
        """Lend the descriptor to one box."""
        async with self._turn:
            if self._file < 0:
                raise SandboxError("sandbox: the snapshot's pool is closed")
            yield self._file

    def replace(self, returned: FrozenLayer) -> None:
        """Take the descriptor that a box gave back."""
        self.close()
        self._file, returned._file = returned._file, -1


@dataclass(frozen=True, kw_only=True, eq=False)
class LayeredSnapshot:
    """State of a box's files, from which other boxes can be forked. Implements `protocols.Snapshot`.

    Attributes:
        layers: frozen layers, lowest first.
        used: whether commands had run in the box.
        prepared: snapshot that verifiers are forks of: the one after `Env.prepare`, or else the first of the box and
            the boxes that it descends from. None: this snapshot itself.
    """

    spec: BoxSpec
    root: Root
    layers: tuple[FrozenLayer, ...] = ()
    folder: str = "/box"
    environment: Mapping[str, str] | None = None
    processes: tuple[str, ...] = ()
    used: bool = False
    prepared: LayeredSnapshot | None = None


class Line:
    """Snapshots of one box, and the state of the snapshot that it is a fork of.

    Args:
        below: snapshot that the box is a fork of.

    Attributes:
        layers: frozen layers below the files that the box writes, lowest first.
        prepared: snapshot that verifiers of the box are forks of.
        judge: in a verifier, a tuple of the snapshot that it is a fork of, or of None; in any other box, ().
    """

    def __init__(self, spec: BoxSpec, root: Root, below: LayeredSnapshot | None) -> None:
        self._state = below or LayeredSnapshot(spec=spec, root=root, folder=root.folder)
        self._spec, self._root = spec, root
        self.layers = self._state.layers
        self.prepared = None if below is None else below.prepared or below
        self.judge: tuple[LayeredSnapshot | None, ...] = ()

    @property
    def used(self) -> bool:
        """Whether commands had run in the box that this one is a fork of."""
        return self._state.used

    def close(self) -> None:
        """Release every layer, once the box is closed."""
        self._state = LayeredSnapshot(spec=self._spec, root=self._root)
        self.layers, self.prepared, self.judge = (), None, ()

    def limits(self) -> Mapping[str, object]:
        """Return the working folder and the environment of commands, for the box's first request."""
        return {"folder": self._state.folder, "environment": self._state.environment}

    def check(self) -> None:
        """Refuse another snapshot of a box with too many layers.

        Raises:
            BadInput: the box has `MOST_LAYERS` layers.
        """
        if len(self.layers) >= MOST_LAYERS:
            expected, actual = f"at most {MOST_LAYERS} snapshots on top of each other", f"{MOST_LAYERS + 1}"
            raise refusal("snapshot", expected, actual, "fork an earlier one")

    def add(self, layers: Sequence[FrozenLayer], processes: Sequence[str], used: bool) -> LayeredSnapshot:
        """Keep layers on top of `layers`, and return a snapshot with all. `processes`: command lines of the processes
        that were ended for it; `used`: whether a command has run in the box or in one that it descends from."""
        self.layers += tuple(layers)
        state = self._state
        made = LayeredSnapshot(
            spec=self._spec,
            root=self._root,
            layers=self.layers,
            folder=state.folder,
            environment=state.environment,
            processes=tuple(processes),
            used=used,
            prepared=self.prepared,
        )
        self.prepared = self.prepared or made
        return made


def check_prepared(used: bool) -> None:
    """Refuse a verifier of a box without a snapshot, if the box is used.

    Raises:
        BadInput: commands have run in the box.
    """
    if used:
        expected = "a box with a snapshot from before the policy's first command"
        remedy = "do: await box.snapshot() at the end of Env.open"
        raise refusal("verifier", expected, "one without, in which commands have run", remedy)


def still_lives(processes: Sequence[str]) -> Exception:
    """Return the refusal of a snapshot while processes still run."""
    expected, remedy = (
        "a box in which no process lives on",
        "close them first, or write snapshot(ends=True), which ends them",
    )
    return refusal("snapshot", expected, repr(list(processes)), remedy)


def checked(snapshot: object) -> LayeredSnapshot:
    """Return the snapshot, if it is of this kind of pool.

    Raises:
        BadInput: `snapshot` is something else.
    """
    if not isinstance(snapshot, LayeredSnapshot):
        actual = f"a {type(snapshot).__name__}"
        raise refusal("fork", "a snapshot of a box of this pool", actual, "pass what `await box.snapshot()` returned")
    return snapshot


@asynccontextmanager
async def lent(layers: Sequence[FrozenLayer]) -> AsyncIterator[list[int]]:
    """Lend the descriptors of layers to one box. Layers are always taken in their order, so no two wait for each
    other."""
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(layer.lent()) for layer in layers]
