"""Names of the weights that an engine serves, for its requests and its cache. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

Weights = int | str
"""Weights that computed keys and values: a version number of the model, or the name of an adapter's load."""


@dataclass(eq=False, slots=True, kw_only=True)
class ServedWeights:
    """Weights of requests: the base model's alone, or together with an adapter's. An update changes them in place.

    Attributes:
        checksum: checksum of the weights; None for the weights that the engine was started with.
        number: number of the adapter; -1 for the base model.
        serial: number of the adapter's load. An adapter that is loaded again under an old name and version has a new
            serial, and so never finds the keys and values of the old one.
    """

    version: int
    checksum: str | None = None
    number: int = -1
    serial: int = 0

    @property
    def key(self) -> Weights:
        """Name of the weights in keys of the cache."""
        return self.version if self.number < 0 else f"adapter {self.serial}"
