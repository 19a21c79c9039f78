"""Transport through a folder that the run's machine and the server's machine share: a file for each of the last
versions.

Each publisher has a subfolder, named `sparring-weights-`, its machine, its process and a random part, and holds a lock
on a file in the subfolder. A file is written under a temporary name and renamed when it is complete. The last `KEPT`
files of a model and of an adapter stay until the publisher is closed; the next publisher on a machine removes the
subfolders of dead publishers there.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
import socket
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from threading import Lock

import msgspec
import torch

from sparring.errors import WeightsError, boundary
from sparring.types import WeightRef
from sparring.weights.inline import about, verify
from sparring.weights.layout import TensorSpan, layout, unpacked
from sparring.weights.shared_memory import PREFIX, opened, write

TRANSPORT = "disk"
KEPT = 2
"""Number of files of a model or an adapter that are kept, one for each version."""
LOCK = "lock"

_PUBLISHER = "-[0-9]+-[0-9a-f]{16}"
_FOLDER = re.compile(re.escape(PREFIX) + r"[\w.-]+" + _PUBLISHER)
_FILE = re.compile("state-[0-9]{6,}")


class DiskLocation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`WeightRef.location` of this transport, as plain data: a `file` of `size` bytes in the publisher's subfolder
    `folder`, an absolute path."""

    folder: str
    file: str
    size: int
    tensors: dict[str, TensorSpan]


class Disk:
    """Link to servers that see the folder `shared` of this machine under the same path. Error messages name `setting`,
    the configuration key of this folder. Implements `Link`."""

    transport = TRANSPORT

    def __init__(self, shared: Path, setting: str) -> None:
        self._shared = shared.absolute()
        self.setting: str | None = setting
        self.about = f"the folder {shared}"
        machine = re.sub(r"[^\w.-]", "_", socket.gethostname())
        self._folder = self._shared / f"{PREFIX}{machine}-{os.getpid()}-{secrets.token_hex(8)}"
        self._of_machine = re.compile(re.escape(f"{PREFIX}{machine}") + _PUBLISHER)
        self._one_thread = Lock()
        self._lock: int | None = None
        self._number = 0
        self._kept: dict[tuple[str, str | None], deque[Path]] = defaultdict(deque)

    @contextmanager
    def published(self, ref: WeightRef) -> Iterator[WeightRef]:
        where = about(ref, "inline")
        size, tensors = layout(ref.location)
        expected = f"{size} free bytes in {self._shared}"
        with self._one_thread, boundary(WeightsError, where, expected, "free some space there"):
            self._open()
            kept = self._kept[ref.model, ref.adapter]
            while len(kept) >= KEPT:
                kept.popleft().unlink(missing_ok=True)
            self._number += 1
            path = self._folder / f"state-{self._number:06d}"
            part = path.with_suffix(".part")
            try:
                descriptor = os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
                try:
                    os.truncate(descriptor, max(1, size))
                    write(descriptor, tensors, ref.location)
                finally:
                    os.close(descriptor)  # a network's folder may tell here that it is full
                part.rename(path)
            finally:
                part.unlink(missing_ok=True)
            kept.append(path)
        location = DiskLocation(folder=str(self._folder), file=path.name, size=size, tensors=tensors)
        yield replace(ref, transport=TRANSPORT, location=msgspec.to_builtins(location))

    def send(self, ref: WeightRef, server: object) -> WeightRef:
        return ref

    def close(self) -> None:
        """Remove the publisher's subfolder."""
        if self._lock is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            os.close(self._lock)
            self._lock = None

    def _open(self) -> None:
        """Remove the subfolders of dead publishers, then make this publisher's subfolder and hold its lock."""
        if self._lock is not None:
            return
        for folder in self._shared.iterdir():
            if not self._of_machine.fullmatch(folder.name):
                continue
            with suppress(OSError):  # removed meanwhile, owned by another user, or its publisher lives
                descriptor = os.open(folder / LOCK, os.O_RDWR)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
                finally:
                    os.close(descriptor)
        fresh = self._folder.with_name(f".{self._folder.name}")  # unseen by the others until it is locked
        fresh.mkdir(mode=0o700)
        try:
            lock = os.open(fresh / LOCK, os.O_CREAT | os.O_RDWR, 0o600)
            with suppress(OSError):  # a folder without locks: what dead publishers leave there stays
                fcntl.flock(lock, fcntl.LOCK_EX)
            fresh.rename(self._folder)
        except OSError:
            shutil.rmtree(fresh, ignore_errors=True)
            raise
        self._lock = lock


def forget(ref: WeightRef) -> None:
    """Remove the publisher's subfolder now. Only for a publisher whose single receiver has fetched its files."""
    shutil.rmtree(msgspec.convert(ref.location, DiskLocation).folder, ignore_errors=True)


def fetch(ref: WeightRef) -> dict[str, torch.Tensor]:
    """Return a verified copy of the published tensors. Raises WeightsError for a reference of another transport, a file
    that cannot be read here, and tensors that differ from the published ones."""
    where = about(ref, TRANSPORT)
    with boundary(WeightsError, where, "a location in a shared folder", "publish them again"):
        location = msgspec.convert(ref.location, DiskLocation)
        folder = Path(location.folder)
    if not (folder.is_absolute() and _FOLDER.fullmatch(folder.name) and _FILE.fullmatch(location.file)):
        raise WeightsError(f"{where}: expected a file {PREFIX}.../state-..., got {location.file!r}; publish them again")
    with opened(folder / location.file, location.size, where) as file:
        # not mapped: a network's file may vanish under a mapping
        data = torch.empty(location.size, dtype=torch.uint8)
        file.readinto(data.numpy().data)
    state = unpacked(data, location.tensors, where)
    verify(ref, state, where)
    return state
