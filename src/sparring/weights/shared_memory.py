"""Transport between processes of one machine: a file in shared memory, which its publisher removes when it is no longer
needed.

`published` is a context manager that removes its file at the end. Until then the publisher holds a lock on the file.
The kernel drops the lock of a dead process, so the next publisher can recognise and remove orphaned files (`sweep`).
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import replace
from io import BufferedReader
from pathlib import Path
from stat import S_ISREG

import msgspec
import torch

from sparring.errors import WeightsError, boundary
from sparring.types import WeightRef
from sparring.weights.inline import about, verify
from sparring.weights.layout import TensorSpan, content, layout, unpacked

TRANSPORT = "shared_memory"
FOLDER = Path("/dev/shm")
PREFIX = "sparring-weights-"
"""Prefix of file names; the publisher's process id and a random part follow."""

_NAME = re.compile(re.escape(PREFIX) + "[0-9]+-[0-9a-f]{16}")


class SegmentLocation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`WeightRef.location` of this transport, as plain data: the name of the file and its size in bytes."""

    segment: str
    size: int
    tensors: dict[str, TensorSpan]


class SharedMemory:
    """Link to servers on this machine. Implements `Link`: a state is written once for all of them."""

    transport, about = TRANSPORT, "shared memory"
    setting: str | None = None

    def published(self, ref: WeightRef) -> AbstractContextManager[WeightRef]:
        return published(ref)

    def send(self, ref: WeightRef, server: object) -> WeightRef:
        return ref

    def close(self) -> None:
        """Do nothing: every publication ends with its context."""


def published(ref: WeightRef) -> AbstractContextManager[WeightRef]:
    """Publish the tensors of an inline reference until the context ends, as `published_one_by_one` does."""
    return published_one_by_one(about(ref, "inline"), ref.location, ref.location.items(), lambda _: ref)


@contextmanager
def published_one_by_one(
    where: str,
    state: Mapping[str, torch.Tensor],
    tensors: Iterable[tuple[str, torch.Tensor]],
    describe: Callable[[Mapping[str, torch.Tensor]], WeightRef],
) -> Iterator[WeightRef]:
    """Publish tensors for other processes of this machine until the context ends. The tensors need not exist at the
    same time. The file gets its name when it is complete, so a crash while writing leaves no file.

    Args:
        state: names, dtypes and shapes of the tensors.
        tensors: name and values of each, in any order.
        describe: function of the published tensors that returns an inline reference to them.

    Raises:
        WeightsError: shared memory is full or missing.
    """
    sweep()
    size, spans = layout(state)
    location = SegmentLocation(segment=f"{PREFIX}{os.getpid()}-{secrets.token_hex(8)}", size=size, tensors=spans)
    with ExitStack() as stack:
        with boundary(WeightsError, where, f"{size} free bytes in {FOLDER}", "free some space there"):
            file = _unnamed(stack, size)
            for name, tensor in tensors:
                write(file, {name: spans[name]}, {name: tensor})
            mapped = torch.frombuffer(mmap.mmap(file, 0, prot=mmap.PROT_READ | mmap.PROT_WRITE), dtype=torch.uint8)
            ref = describe(unpacked(mapped[:size], spans, where))
            _name(stack, file, location)
        yield replace(ref, transport=TRANSPORT, location=msgspec.to_builtins(location))


def fetch(ref: WeightRef) -> dict[str, torch.Tensor]:
    """Return the published tensors, verified. They are mapped, not copied: a file with a name is not written any more,
    and a receiver copies what it keeps. Writing to the tensors changes neither the file nor another process's tensors.
    Raises WeightsError if the reference has another transport, the file is gone, or the tensors have changed since."""
    where = about(ref, TRANSPORT)
    with boundary(WeightsError, where, "a location in shared memory", "publish them again"):
        location = msgspec.convert(ref.location, SegmentLocation)
    if not _NAME.fullmatch(location.segment):
        raise WeightsError(f"{where}: expected a segment {PREFIX}..., got {location.segment!r}; publish them again")
    state = unpacked(_mapped(FOLDER / location.segment, location.size, where), location.tensors, where)
    verify(ref, state, where)
    return state


def forget(ref: WeightRef) -> None:
    """Unlink the file now; the mapped tensors stay valid. Only for weights whose single receiver has fetched them."""
    (FOLDER / msgspec.convert(ref.location, SegmentLocation).segment).unlink(missing_ok=True)


def sweep() -> None:
    """Remove the files of dead publishers: files without a lock."""
    for path in FOLDER.glob(f"{PREFIX}*"):
        # removed meanwhile, owned by another user, or lent by a live publisher
        with suppress(OSError):
            descriptor = _without_waiting(path, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(descriptor)


def _unnamed(stack: ExitStack, size: int) -> int:
    """Make a file of `size` bytes without a name, locked; return its descriptor."""
    file = os.open(FOLDER, os.O_TMPFILE | os.O_RDWR, 0o600)
    stack.callback(os.close, file)
    fcntl.flock(file, fcntl.LOCK_EX)
    os.posix_fallocate(file, 0, max(1, size))
    return file


def _name(stack: ExitStack, file: int, location: SegmentLocation) -> None:
    """Give a complete file its name; closing `stack` removes the name."""
    folder = os.open(FOLDER, os.O_PATH)
    stack.callback(os.close, folder)
    # Python follows the link to the unnamed file only with dst_dir_fd
    os.link(f"/proc/self/fd/{file}", location.segment, dst_dir_fd=folder, follow_symlinks=True)
    stack.callback((FOLDER / location.segment).unlink, missing_ok=True)


def write(descriptor: int, tensors: Mapping[str, TensorSpan], state: Mapping[str, torch.Tensor]) -> None:
    """Write each tensor at its position."""
    for name, span in tensors.items():
        offset, data = span.offset, content(state[name])
        while data:
            count = os.pwrite(descriptor, data, offset)
            offset, data = offset + count, data[count:]


@contextmanager
def opened(path: Path, size: int, where: str) -> Iterator[BufferedReader]:
    """Open a published file of `size` bytes, at least 1. Raises WeightsError if the file is gone, has another size or
    cannot be read."""
    with ExitStack() as stack, boundary(WeightsError, where, "a readable file", "publish them again"):
        try:
            file = stack.enter_context(open(path, "rb", opener=_without_waiting))
        except FileNotFoundError:
            raise WeightsError(
                f"{where}: expected the file {path.name}, got none: its publisher has removed it or has ended, or "
                f"{path.parent} is another folder here; publish them again"
            ) from None
        found = os.fstat(file.fileno())
        if not S_ISREG(found.st_mode) or found.st_size != max(1, size):
            raise WeightsError(f"{where}: expected a file of {size} bytes, got another size; publish them again")
        yield file


def _without_waiting(path: str | Path, flags: int) -> int:
    """Open a file without waiting: other users may write in its folder, and opening a pipe would block the thread for
    ever."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW)


def _mapped(path: Path, size: int, where: str) -> torch.Tensor:
    with opened(path, size, where) as file:
        return torch.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), dtype=torch.uint8)[:size]
