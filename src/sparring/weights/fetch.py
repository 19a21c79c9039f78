"""Fetch of published weights by transport; the one place that knows all transports."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

from sparring.errors import WeightsError
from sparring.types import WeightRef
from sparring.weights import inline, shared_memory

TRANSPORTS: Mapping[str, Callable[[WeightRef], dict[str, torch.Tensor]]] = MappingProxyType(
    {"inline": inline.fetch, shared_memory.TRANSPORT: shared_memory.fetch}
)


def fetch(ref: WeightRef) -> dict[str, torch.Tensor]:
    """Return the published tensors, verified. They may share the reference's storage, so a receiver copies them
    (`CausalModel.load_state` does).

    Raises:
        WeightsError: the transport is unknown, or fails (see the transports).
    """
    if ref.transport not in TRANSPORTS:
        where, transports = f"weights of {ref.model} version {ref.version}", ", ".join(TRANSPORTS)
        raise WeightsError(
            f"{where}: expected one of the transports {transports}, got {ref.transport!r}; publish them with one"
        )
    return TRANSPORTS[ref.transport](ref)
