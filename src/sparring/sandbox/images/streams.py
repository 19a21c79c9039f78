"""Streams of archives: decompressed, compared with digests, and read as a tar with bounded memory."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import lzma
import tarfile
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO, cast

from sparring.errors import refusal

PIECE_BYTES = 1 << 20
CUT = (EOFError, zlib.error, gzip.BadGzipFile, lzma.LZMAError, tarfile.TarError)
"""Errors of archives that are truncated or damaged."""
ALLOW = "if you trust it, allow more (--most-bytes)"
SAVE = "do: write it again, by `docker save`, `podman save` or `skopeo copy`"


def decompressed(file: BinaryIO, where: str) -> BinaryIO:
    """Return a stream of the decompressed bytes of a file, by its first bytes: gzip, bzip2, xz, zstd or none.

    Raises:
        BadInput: the file is zstd, which this Python's standard library does not read (before 3.14).
    """
    buffered = io.BufferedReader(cast(io.RawIOBase, file), PIECE_BYTES)
    head = buffered.peek(6)[:6]
    if head.startswith(b"\x28\xb5\x2f\xfd"):
        try:
            from compression import zstd  # type: ignore[import-not-found,unused-ignore]  # Python 3.14
        except ImportError:
            remedy = "do: skopeo copy --dest-compress-format gzip, or docker save, which does not compress"
            raise refusal(where, "a layer compressed by gzip, or not at all", "zstd", remedy) from None
        return cast(BinaryIO, zstd.ZstdFile(buffered))
    if head.startswith(b"\x1f\x8b"):
        return cast(BinaryIO, gzip.GzipFile(fileobj=buffered))
    if head.startswith(b"BZh"):
        return cast(BinaryIO, bz2.BZ2File(buffered))
    return cast(BinaryIO, lzma.LZMAFile(buffered)) if head.startswith(b"\xfd7zXZ\x00") else buffered


class Checked(io.RawIOBase):
    """Reader of a stream that hashes what passes, and refuses more than a bound.

    Args:
        digest: digest that the bytes must have, `algorithm:hex`; "" for none.
        most_bytes: maximum number of bytes.
        remedy: what to do if there are more.
    """

    def __init__(self, file: BinaryIO, where: str, digest: str, most_bytes: int, remedy: str = ALLOW) -> None:
        self._file = file
        self._where = where
        self._digest = digest
        self._most = most_bytes
        self._remedy = remedy
        self._hash = hashlib.new(digest.partition(":")[0] or "sha256")
        self.num_bytes = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer with the next bytes and return their number; 0 at the end."""
        piece = self._file.read(len(buffer))
        self.num_bytes += len(piece)
        if self.num_bytes > self._most:
            raise refusal(self._where, f"at most {self._most} bytes", "more", self._remedy)
        self._hash.update(piece)
        buffer[: len(piece)] = piece
        return len(piece)

    def finish(self) -> None:
        """Read to the end and compare the digest.

        Raises:
            BadInput: the bytes have another digest.
        """
        while self.read(PIECE_BYTES):
            pass
        found = f"{self._hash.name}:{self._hash.hexdigest()}"
        if self._digest and found != self._digest:
            raise refusal(self._where, f"bytes whose digest is {self._digest}", found, f"it is cut or spoilt; {SAVE}")


class TarStream:
    """Uncompressed tar that is read forwards, as tarfile sees it. Headers are small: one of gigabytes would be read
    into memory."""

    def __init__(self, file: BinaryIO, where: str) -> None:
        self._file = file
        self._at = 0
        self.where = where
        self.allowed = PIECE_BYTES
        """Bytes that the headers before the next entry may still have."""
        self.block = b""
        """Bytes that were read last."""

    def tell(self) -> int:
        """Return the number of bytes passed."""
        return self._at

    def read(self, count: int) -> bytes:
        """Return bytes of headers."""
        self.allowed -= count
        if self.allowed < 0:
            actual = f"more, or a sparse file's map, at byte {self._at}"
            raise refusal(self.where, f"headers of at most {PIECE_BYTES} bytes for each entry", actual, SAVE)
        self.block = self.take(count)
        return self.block

    def take(self, count: int) -> bytes:
        """Return bytes of an entry's content; fewer than asked for only at the end."""
        data = self._file.read(count)
        while 0 < len(data) < count and (more := self._file.read(count - len(data))):
            data += more
        self._at += len(data)
        return data

    def seek(self, to: int) -> None:
        """Skip to a later place."""
        if to < self._at:
            raise refusal(self.where, "entries in order", f"one that goes back at byte {self._at}", SAVE)
        if self._file.seekable():
            self._at = self._file.seek(to)
            return
        while self._at < to and self.take(min(PIECE_BYTES, to - self._at)):
            pass


def members(stream: TarStream) -> Iterator[tarfile.TarInfo]:
    """Yield the entries of a tar, keeping none of them.

    Raises:
        BadInput: an entry has no valid header, or is a sparse file.
        TarError: the tar is truncated.
    """
    try:
        with tarfile.TarFile(fileobj=cast(Any, stream), mode="r") as tar:
            while (member := tar.next()) is not None:
                tar.members.clear()  # type: ignore[attr-defined]
                tar.pax_headers = {}
                if member.issparse() or member.size < 0 or "\0" in member.name + member.linkname:
                    actual = "a sparse file, or a name with a NUL"
                    raise refusal(f"{stream.where}: {member.name!r}", "a plain entry", actual, SAVE)
                yield member
                stream.allowed = PIECE_BYTES
    except (ValueError, RecursionError) as error:
        raise refusal(stream.where, "entries of a tar", f"{type(error).__name__}: {error}"[:200], SAVE) from error
    if stream.block.strip(b"\0"):  # tarfile takes a spoilt header for the end
        raise refusal(stream.where, "entries of a tar", f"a spoilt header near byte {stream.tell()}", SAVE)
