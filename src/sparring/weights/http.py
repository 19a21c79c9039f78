"""Transport over HTTP: the run sends a state to the server in buckets of 64 MiB with a digest each; the server opens no
connection."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import msgspec
import torch
import xxhash

from sparring.errors import WeightsError, boundary
from sparring.types import WeightRef
from sparring.weights.inline import about, verify
from sparring.weights.layout import TensorSpan, layout, pieces, unpacked
from sparring.weights.links import LinkServer
from sparring.weights.upload import BUCKET, Bucket, Received

TRANSPORT = "http"


class UploadLocation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`WeightRef.location` of this transport, as plain data: the name of an upload and its size in bytes."""

    upload: str
    size: int
    tensors: dict[str, TensorSpan]


class Http:
    """Link to servers that share no memory or folder with this machine; the state is sent to each server. Implements
    `Link`."""

    transport, about = TRANSPORT, "HTTP"
    setting: str | None = None

    @contextmanager
    def published(self, ref: WeightRef) -> Iterator[WeightRef]:
        yield ref

    def send(self, ref: WeightRef, server: LinkServer) -> WeightRef:
        size, tensors = layout(ref.location)
        location = UploadLocation(upload=secrets.token_hex(8), size=size, tensors=tensors)
        offset = 0
        for data in pieces(ref.location, BUCKET):
            digest, length = xxhash.xxh3_128(), sum(map(len, data))
            for piece in data:
                digest.update(piece)
            server.take(
                Bucket(upload=location.upload, size=size, offset=offset, length=length, digest=digest.hexdigest()),
                data,
            )
            offset += length
        return replace(ref, transport=TRANSPORT, location=msgspec.to_builtins(location))

    def close(self) -> None:
        """Do nothing: the server drops an upload when it has fetched it."""


def fetch(ref: WeightRef) -> dict[str, torch.Tensor]:
    """Return the verified tensors of an upload. They share the upload's storage, so a receiver copies them. Raises
    WeightsError for another transport, an upload that is not here, and tensors that differ from the published ones."""
    where = about(ref, TRANSPORT)
    if not isinstance(ref.location, Received):
        raise WeightsError(f"{where}: expected an upload to this process, got none; send it to the engine's server")
    with boundary(WeightsError, where, "a location of an upload", "send it again"):
        location = msgspec.convert(ref.location.location, UploadLocation)
    data = torch.frombuffer(ref.location.data, dtype=torch.uint8)
    state = unpacked(data[: location.size], location.tensors, where)
    verify(ref, state, where)
    return state
