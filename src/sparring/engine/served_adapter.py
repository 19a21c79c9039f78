"""Adapters that an engine serves, as its requests refer to them. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(eq=False, slots=True)
class ServedAdapter:
    """Adapter that is served under a name. An update changes `version`, `checksum` and `serial` in place.

    Attributes:
        serial: number of its load. An adapter that is loaded again under an old name and version has a new serial, and
            so never finds the keys and values of the old one.
    """

    name: str
    number: int
    version: int
    checksum: str | None
    serial: int

    @property
    def weights(self) -> str:
        """Name of the weights in the cache's keys."""
        return f"adapter {self.serial}"
