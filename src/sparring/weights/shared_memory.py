"""Transport between processes of one machine: a file in shared memory, which its publisher removes when it is no longer
needed.

`published` is a context manager that removes its file at the end. Until then the publisher holds a lock on the file.
The kernel drops the lock of a dead process, so the next publisher can recognise and remove orphaned files (`sweep`).
"""

from __future__ import annotations

import fcntl
import math
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import torch

from sparring.errors import WeightsError, boundary
from sparring.types import WeightRef
from sparring.weights.checksum import checksum
from sparring.weights.inline import Probe

TRANSPORT = "shared_memory"
FOLDER = Path("/dev/shm")
PREFIX = "sparring-weights-"
"""Prefix of file names; the publisher's process id and a random part follow."""
ALIGNMENT = 64
"""Alignment of tensors in the file, in bytes."""

_NAME = re.compile(re.escape(PREFIX) + "[0-9]+-[0-9a-f]{16}")


class TensorSpan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Position of one tensor in the file: `offset` in bytes, `dtype` with torch's name ("float32")."""

    dtype: str
    shape: tuple[int, ...]
    offset: int


class Location(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`WeightRef.location` of this transport, as plain data.

    Attributes:
        segment: name of the file.
        size: size of the file in bytes.
    """

    segment: str
    size: int
    tensors: dict[str, TensorSpan]


@contextmanager
def published(
    model: str,
    version: int,
    state: Mapping[str, torch.Tensor],
    probe: Probe | None = None,
    *,
    adapter: str | None = None,
) -> Iterator[WeightRef]:
    """Publish a copy of `state` that other processes of this machine can fetch until the context ends. Takes the
    arguments of `inline.publish`.

    The file gets its name when it is complete, so a crash while writing leaves no file.

    Raises:
        WeightsError: shared memory is full or missing.
    """
    sweep()
    location = _layout(f"{PREFIX}{os.getpid()}-{secrets.token_hex(8)}", state)
    with ExitStack() as stack:
        where, room = f"weights of {model} version {version}", f"{location.size} free bytes in {FOLDER}"
        with boundary(WeightsError, where, room, "free some space there"):
            _lend(stack, location, state)
        yield WeightRef(
            model=model,
            version=version,
            checksum=checksum(state),
            transport=TRANSPORT,
            location=msgspec.to_builtins(location),
            probe=probe,
            adapter=adapter,
        )


def fetch(ref: WeightRef) -> dict[str, torch.Tensor]:
    """Return a verified copy of the published tensors; later changes by the publisher do not affect it.

    Raises:
        WeightsError: the reference has another transport, its file is gone, or its tensors have changed since they were
            published.
    """
    where = f"weights of {ref.model} version {ref.version}"
    if ref.transport != TRANSPORT:
        raise WeightsError(
            f"{where}: expected transport {TRANSPORT!r}, got {ref.transport!r}; fetch them with that transport"
        )
    with boundary(WeightsError, where, "a location in shared memory", "publish them again"):
        location = msgspec.convert(ref.location, Location)
    if not _NAME.fullmatch(location.segment):
        raise WeightsError(f"{where}: expected a segment {PREFIX}..., got {location.segment!r}; publish them again")
    data = _read(FOLDER / location.segment, location.size, where)
    with boundary(WeightsError, where, "tensors within their segment", "publish them again"):
        state = {name: _view(data, span) for name, span in location.tensors.items()}
    actual = checksum(state)
    if actual != ref.checksum:
        raise WeightsError(f"{where}: expected checksum {ref.checksum}, got {actual}; publish them again")
    return state


def sweep() -> None:
    """Remove the files of dead publishers, recognised by the missing lock."""
    for path in FOLDER.glob(f"{PREFIX}*"):
        # removed meanwhile, owned by another user, or lent by a live publisher
        with suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(descriptor)


def _lend(stack: ExitStack, location: Location, state: Mapping[str, torch.Tensor]) -> None:
    """Write the file, locked from the start, and then name it; `stack` undoes every step."""
    folder = os.open(FOLDER, os.O_PATH)
    stack.callback(os.close, folder)
    file = os.open(FOLDER, os.O_TMPFILE | os.O_RDWR, 0o600)
    stack.callback(os.close, file)
    fcntl.flock(file, fcntl.LOCK_EX)
    os.posix_fallocate(file, 0, max(1, location.size))
    for name, span in location.tensors.items():
        _write(file, span.offset, _bytes(state[name]))
    # Python follows the link to the unnamed file only with dst_dir_fd
    os.link(f"/proc/self/fd/{file}", location.segment, dst_dir_fd=folder, follow_symlinks=True)
    stack.callback((FOLDER / location.segment).unlink, missing_ok=True)


def _layout(segment: str, state: Mapping[str, torch.Tensor]) -> Location:
    places, offset = {}, 0
    for name, tensor in state.items():
        places[name] = TensorSpan(
            dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape), offset=offset
        )
        offset += -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT
    return Location(segment=segment, size=offset, tensors=places)


def _bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _write(descriptor: int, offset: int, data: memoryview) -> None:
    while data:
        count = os.pwrite(descriptor, data, offset)
        offset, data = offset + count, data[count:]


def _read(path: Path, size: int, where: str) -> torch.Tensor:
    """Read a segment as uint8 [size]."""
    data = None
    with boundary(WeightsError, where, "a readable segment", "publish them again"):
        try:
            with open(path, "rb") as file:
                if os.fstat(file.fileno()).st_size == max(1, size):
                    data = torch.empty(size, dtype=torch.uint8)
                    file.readinto(data.numpy().data)
        except FileNotFoundError:
            raise WeightsError(
                f"{where}: expected the segment {path.name}, got none: its publisher has removed it or has ended; "
                "publish them again"
            ) from None
    if data is None:
        raise WeightsError(f"{where}: expected a segment of {size} bytes, got another size; publish them again")
    return data


def _view(data: torch.Tensor, span: TensorSpan) -> torch.Tensor:
    dtype: Any = getattr(torch, span.dtype)
    end = span.offset + math.prod(span.shape) * dtype.itemsize
    if not 0 <= span.offset <= end <= len(data):
        raise ValueError(f"bytes {span.offset} to {end} of {len(data)}")
    return data[span.offset : end].view(dtype).reshape(span.shape)
