"""Locks of layers that may not be deleted, because boxes use them."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

from sparring.errors import refusal


def hold(layer: Path, locks: ExitStack) -> bool:
    """Lock an unpacked layer against deletion until `locks` closes. Return False if the layer does not exist."""
    with ExitStack() as opened:
        try:
            lock = os.open(layer, os.O_RDONLY | os.O_CLOEXEC)
            opened.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_SH)  # a removal holds it for one rename
            if os.path.samestat(os.fstat(lock), os.stat(layer)):
                locks.push(opened.pop_all())
                return True
        except FileNotFoundError:
            pass
    return False


class HeldLayers:
    """Layers that boxes of a pool use, locked from their first use until the pool is closed."""

    def __init__(self) -> None:
        self._layers: set[Path] = set()
        self._locks = ExitStack()

    def add(self, layers: Iterable[Path]) -> None:
        """Lock layers.

        Raises:
            BadInput: a layer does not exist.
        """
        for layer in layers:
            if layer not in self._layers:
                if not hold(layer, self._locks):
                    raise refusal("box.image", "unpacked layers", f"no folder {layer}", "do: pull the image again")
                self._layers.add(layer)

    def close(self) -> None:
        """Release all locks."""
        self._layers.clear()
        self._locks.close()
