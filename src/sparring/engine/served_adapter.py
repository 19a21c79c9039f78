"""An adapter as requests refer to it while an engine serves it. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(eq=False, slots=True)
class ServedAdapter:
    """An adapter under its name; a swap changes `version`, `checksum` and `serial` in place. `serial` is of this load
    alone: an adapter that comes again under an old name and version has another, and so finds no keys and values of the
    old one."""

    name: str
    number: int
    version: int
    checksum: str | None
    serial: int

    @property
    def weights(self) -> str:
        """What its keys and values are called in the cache."""
        return f"adapter {self.serial}"
