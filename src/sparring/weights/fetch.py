"""Fetch of published weights by transport, and the links that publish weights. Only this module knows all
transports."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import torch

from sparring.errors import WeightsError
from sparring.types import WeightRef
from sparring.weights import disk, http, inline, shared_memory
from sparring.weights.links import Link, WeightLinks

SHARED_FOLDER = "engine.shared_folder"
TRANSPORTS: Mapping[str, Callable[[WeightRef], dict[str, torch.Tensor]]] = MappingProxyType(
    {
        "inline": inline.fetch,
        shared_memory.TRANSPORT: shared_memory.fetch,
        disk.TRANSPORT: disk.fetch,
        http.TRANSPORT: http.fetch,
    }
)


def fetch(ref: WeightRef) -> dict[str, torch.Tensor]:
    """Return the published tensors, verified; refuse an unknown transport (`WeightsError`). The tensors may share the
    reference's storage, so a receiver copies them (`CausalModel.load_state` does)."""
    if ref.transport not in TRANSPORTS:
        where, transports = f"weights of {ref.model} version {ref.version}", ", ".join(TRANSPORTS)
        raise WeightsError(
            f"{where}: expected one of the transports {transports}, got {ref.transport!r}; publish them with one"
        )
    return TRANSPORTS[ref.transport](ref)


def links(shared_folder: str = "") -> WeightLinks:
    """Return the links of a run, the fastest first; `shared_folder` is `engine.shared_folder`, "" for none."""
    folder: tuple[Link, ...] = (disk.Disk(Path(shared_folder), SHARED_FOLDER),) if shared_folder else ()
    return WeightLinks((shared_memory.SharedMemory(), *folder, http.Http()))
