"""Transport between a trainer and an engine in one process: an object in memory, copied on both sides."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from sparring.errors import WeightsError
from sparring.types import WeightRef
from sparring.weights.checksum import checksum, checksums

Probe = tuple[tuple[int, ...], tuple[float, ...]]


def publish(
    model: str,
    version: int,
    state: Mapping[str, torch.Tensor],
    probe: Probe | None = None,
    *,
    adapter: str | None = None,
) -> WeightRef:
    """Copy `state` and return a reference to the copy, which shares no storage with the trainer (law 9).

    Args:
        version: number of updates that the weights have received.
        state: parameters by Hugging Face name, or an adapter's state.
        probe: tokens [T] and the log-probabilities [T - 1] of tokens[1:] under these weights at temperature 1; the
            receiver has to reproduce these log-probabilities.
        adapter: name of the model's adapter; None for the model itself.
    """
    copies = {name: tensor.detach().clone() for name, tensor in state.items()}
    return reference(model, version, copies, probe, adapter=adapter)


def reference(
    model: str,
    version: int,
    state: Mapping[str, torch.Tensor],
    probe: Probe | None = None,
    *,
    adapter: str | None = None,
) -> WeightRef:
    """Return a reference to `state` itself, which must not change while the reference is used. Takes the arguments of
    `publish`."""
    checksum, digests = checksums(state)
    return WeightRef(
        model=model,
        version=version,
        checksum=checksum,
        transport="inline",
        location=state,
        probe=probe,
        adapter=adapter,
        digests=digests,
    )


def fetch(ref: WeightRef) -> dict[str, torch.Tensor]:
    """Return the published tensors, verified. They share the reference's storage, so a receiver copies them
    (`CausalModel.load_state` does). Raises WeightsError for another transport, and tensors that have changed since."""
    where = about(ref, "inline")
    state = dict(ref.location)
    verify(ref, state, where)
    return state


def about(ref: WeightRef, transport: str) -> str:
    """Return the name of published weights in messages; refuse a reference whose transport is not `transport`
    (`WeightsError`)."""
    where = f"weights of {ref.model} version {ref.version}"
    if ref.transport != transport:
        raise WeightsError(
            f"{where}: expected transport {transport!r}, got {ref.transport!r}; fetch them with that transport"
        )
    return where


def verify(ref: WeightRef, state: Mapping[str, torch.Tensor], where: str) -> None:
    """Refuse fetched tensors that differ in a bit from the published ones (`WeightsError`). The message names the first
    different tensor, if the publisher computed a digest of each."""
    actual = checksum(state)
    if actual != ref.checksum:
        _, found = checksums(state)
        first = next((name for name in sorted(ref.digests) if found.get(name) != ref.digests[name]), None)
        tensor = "" if first is None else f", first in tensor {first}"
        raise WeightsError(f"{where}: expected checksum {ref.checksum}, got {actual}{tensor}; publish them again")
