"""Uploads: states that arrive at a server in buckets and wait there to be fetched. Torch-free."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import msgspec
import xxhash

from sparring.errors import WeightsError

ALIGNMENT = 64
"""Alignment of tensors in an upload or a file, in bytes."""

BUCKET = 64 << 20
"""Number of bytes of a bucket; the last one of an upload may be smaller."""


def upload_bytes(sizes: Iterable[int]) -> int:
    """Return the maximum number of bytes of an upload of float32 tensors; `sizes` are their numbers of elements."""
    return sum(4 * size + ALIGNMENT for size in sizes)


class Bucket(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Part of an upload.

    Attributes:
        upload: name of the upload, chosen at random by the sender.
        size: bytes of the whole upload.
        offset: position of the bucket in the upload, in bytes.
        digest: xxh3-128 of the bucket's bytes, in hexadecimal digits.
    """

    upload: str
    size: int
    offset: int
    length: int
    digest: str


class Received(NamedTuple):
    """`WeightRef.location` of an upload inside the server: the location that the client sent, and the upload's
    bytes."""

    location: Mapping[str, Any]
    data: mmap.mmap


class Upload:
    """State of `size` bytes that arrives in order.

    Attributes:
        data: the bytes; their memory is not in use before they arrive.
        received: number of bytes that are complete and verified.
    """

    def __init__(self, name: str, size: int) -> None:
        self.name, self.size, self.received = name, size, 0
        self.data = mmap.mmap(-1, max(1, size))


class Receiving:
    """Writer of a bucket that arrives in chunks."""

    def __init__(self, upload: Upload, bucket: Bucket) -> None:
        self._upload, self._bucket = upload, bucket
        self._at, self._digest = bucket.offset, xxhash.xxh3_128()

    def add(self, chunk: bytes) -> None:
        """Write the next bytes; refuse more bytes than the bucket has (`WeightsError`)."""
        end = self._at + len(chunk)
        if end > self._bucket.offset + self._bucket.length:
            raise _wrong(self._bucket, f"{self._bucket.length} bytes", "more")
        self._upload.data[self._at : end] = chunk
        self._digest.update(chunk)
        self._at = end

    def finish(self) -> None:
        """Count the bucket as received; refuse a bucket with missing bytes or a wrong digest (`WeightsError`)."""
        bucket, digest = self._bucket, self._digest.hexdigest()
        if self._at != bucket.offset + bucket.length:
            raise _wrong(bucket, f"{bucket.length} bytes", str(self._at - bucket.offset))
        if digest != bucket.digest:
            raise _wrong(bucket, f"digest {bucket.digest}", digest)
        self._upload.received = max(self._upload.received, self._at)


class UploadArea:
    """Memory of a server for one upload of at most `most` bytes. The first bucket of another upload replaces the
    present one."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._upload: Upload | None = None

    def receive(self, bucket: Bucket) -> Receiving:
        """Begin to receive a bucket. Raises WeightsError if the upload is too large, its earlier buckets are missing,
        or another upload has replaced it."""
        if bucket.size > self._most:
            raise _wrong(bucket, f"an upload of at most {self._most} bytes, as large as the model", str(bucket.size))
        if not 0 <= bucket.offset <= bucket.offset + bucket.length <= bucket.size or bucket.length > BUCKET:
            raise _wrong(bucket, f"at most {BUCKET} bytes within {bucket.size}", f"{bucket.length} at {bucket.offset}")
        if not bucket.offset:
            self._upload = Upload(bucket.upload, bucket.size)
        upload = self._upload
        if upload is None or upload.name != bucket.upload or upload.size != bucket.size:
            raise _wrong(bucket, "the upload that began last", "another; use one server per run")
        if bucket.offset != upload.received:
            raise _wrong(bucket, f"the bytes from {upload.received} on", str(bucket.offset))
        return Receiving(upload, bucket)

    def complete(self, name: str, where: str) -> Upload:
        """Return a complete upload. Raises WeightsError if the upload is incomplete, or another upload has replaced
        it."""
        upload = self._upload
        if upload is None or upload.name != name:
            raise WeightsError(f"{where}: expected the upload {name}, got none or another; send it again")
        if upload.received != upload.size:
            raise WeightsError(
                f"{where}: expected an upload of {upload.size} bytes, got {upload.received}; send it again"
            )
        return upload

    def drop(self, name: str) -> None:
        """Forget an upload."""
        if self._upload is not None and self._upload.name == name:
            self._upload = None


def _wrong(bucket: Bucket, expected: str, found: str) -> WeightsError:
    where = f"upload {bucket.upload}, bucket at {bucket.offset}"
    return WeightsError(f"{where}: expected {expected}, got {found}; send the upload again")
