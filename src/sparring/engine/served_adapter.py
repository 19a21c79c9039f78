"""Adapters as requests refer to them while an engine serves them. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(eq=False, slots=True)
class ServedAdapter:
    """Adapter under its name. An update changes `version`, `checksum` and `serial` in place. `serial` numbers loads: an
    adapter that is loaded again under an old name and version has a new one, and so never finds the keys and values of
    the old one."""

    name: str
    number: int
    version: int
    checksum: str | None
    serial: int

    @property
    def weights(self) -> str:
        """Name of the weights in the cache's keys."""
        return f"adapter {self.serial}"
