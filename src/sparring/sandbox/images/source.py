"""Archives of images: an OCI layout (a folder or a tar) or the tar that `docker save` writes. Every blob is checked
against its digest while it is read."""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import posixpath
import re
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from sparring.errors import refusal
from sparring.sandbox.images.image import Bounds, ImageConfig
from sparring.sandbox.images.streams import CUT, PIECE_BYTES, SAVE, Checked, TarStream, decompressed, members

DIGEST = re.compile(r"(sha256:[0-9a-f]{64}|sha512:[0-9a-f]{128})")
MOST_TEXT_BYTES = 4 << 20
"""Maximum size of a manifest, an index or a configuration (OCI image specification, manifest.md)."""
MOST_LAYERS = 200
MOST_LINKS = 40
MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}


class SourceFolder:
    """Files of a folder, by their relative paths."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def has(self, name: str) -> bool:
        """Return True if there is a file by this name."""
        return os.path.isfile(self._folder / name)

    def open(self, name: str) -> BinaryIO:
        """Open a regular file; a pipe or a device is refused without waiting.

        Raises:
            BadInput: the file does not exist, or is not a regular file.
        """
        where = str(self._folder / name)
        if ".." in name.split("/") or name.startswith("/"):
            raise refusal(where, "a part within the folder", repr(name), SAVE)
        return _opened_file(where, "a part of the image", SAVE)


def _opened_file(where: str, expected: str, remedy: str) -> BinaryIO:
    """Open a regular file, without waiting for a pipe.

    Raises:
        BadInput: the file cannot be opened, or is not a regular file.
    """
    try:
        file = os.fdopen(os.open(where, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb", buffering=0)
    except (OSError, ValueError) as error:
        actual = error.strerror if isinstance(error, OSError) else str(error)
        raise refusal(where, expected, actual or "an error", remedy) from error
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise refusal(where, "a regular file", "something else", remedy)
    return cast(BinaryIO, file)


class SourceTar:
    """Files of an uncompressed tar that can be sought, by their names; links in it are followed."""

    def __init__(self, file: BinaryIO, where: str, most_entries: int) -> None:
        self._file = file
        self._where = where
        self._places: dict[str, tuple[int, int]] = {}
        self._links: dict[str, str] = {}
        for count, member in enumerate(members(TarStream(file, where))):
            if count >= most_entries:
                raise refusal(where, f"at most {most_entries} entries", "more", "allow more (--most-files)")
            name = posixpath.normpath(member.name)
            if member.isreg():
                self._places[name] = (member.offset_data, member.size)
            elif member.issym():
                self._links[name] = posixpath.normpath(posixpath.join(posixpath.dirname(name), member.linkname))
            elif member.islnk():
                self._links[name] = posixpath.normpath(member.linkname)

    def has(self, name: str) -> bool:
        """Return True if there is a file by this name."""
        return name in self._places or name in self._links

    def open(self, name: str) -> BinaryIO:
        """Open a file of the tar.

        Raises:
            BadInput: the file does not exist, or links form a loop.
        """
        target = posixpath.normpath(name)
        for _ in range(MOST_LINKS):
            if target not in self._links or target in self._places:
                break
            target = self._links[target]
        else:
            raise refusal(f"{self._where}: {name}", "a file", "a loop of links", SAVE)
        if target not in self._places:
            raise refusal(f"{self._where}: {name}", "a part of the image", "nothing by this name", SAVE)
        return cast(BinaryIO, _Slice(self._file, *self._places[target]))


class _Slice(io.RawIOBase):
    """Bytes of a part of a file, which several slices share."""

    def __init__(self, file: BinaryIO, start: int, count: int) -> None:
        self._file = file
        self._at = start
        self._end = start + count

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._at)
        piece = self._file.read(min(len(buffer), self._end - self._at))
        if not piece and self._at < self._end:
            raise EOFError("the archive ends within it")
        self._at += len(piece)
        buffer[: len(piece)] = piece
        return len(piece)


class Archive:
    """One image in an archive: its configuration and its layers.

    Attributes:
        digest: digest of the configuration.
        config: configuration of the image's programs.
        diff_ids: digests of the uncompressed layers, lowest first.
    """

    def __init__(self, source: SourceFolder | SourceTar, where: str, bounds: Bounds) -> None:
        self._source = source
        self._where = where
        self._bounds = bounds
        self._layers: list[tuple[str, str, int]] = []
        """Layers, lowest first: name in the source, digest of the bytes or "", size in bytes or -1."""
        if source.has("index.json"):
            text = self._of_layout()
        elif source.has("manifest.json"):
            text = self._of_docker()
        else:
            actual = "neither an index.json (OCI) nor a manifest.json (docker save)"
            raise refusal(where, "an archive of an image", actual, SAVE)
        self._read_config(text)

    def layer(self, at: int) -> tuple[str, LayerStream]:
        """Return the name of layer `at` for refusals, and its bytes; layer 0 is the lowest."""
        name, digest, size = self._layers[at]
        where = f"{self._where}: layer {digest or name}"
        return where, LayerStream(self._source.open(name), where, digest, size, self.diff_ids[at], self._bounds)

    def _text(self, name: str, digest: str = "", size: int = -1) -> bytes:
        where = f"{self._where}: {name}"
        with self._source.open(name) as file:
            checked = Checked(file, where, digest, min(MOST_TEXT_BYTES, size if size >= 0 else MOST_TEXT_BYTES), SAVE)
            text = checked.readall()
            checked.finish()
        return text or b""

    def _json(self, text: bytes, name: str) -> Any:
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise refusal(f"{self._where}: {name}", "JSON", str(error)[:100], SAVE) from error

    def _blob(self, described: Any, where: str) -> tuple[str, str, int]:
        """Return the name, digest and size of a blob from its descriptor."""
        digest = described.get("digest") if isinstance(described, dict) else None
        size = described.get("size") if isinstance(described, dict) else None
        if not isinstance(digest, str) or not DIGEST.fullmatch(digest) or not isinstance(size, int) or size < 0:
            raise refusal(f"{self._where}: {where}", "a descriptor with digest and size", repr(described)[:100], SAVE)
        return f"blobs/{digest.replace(':', '/')}", digest, size

    def _of_layout(self) -> bytes:
        index = self._json(self._text("index.json"), "index.json")
        for _ in range(4):  # an index may name an index
            described = self._chosen(index)
            manifest = self._json(self._text(*self._blob(described, "an index")), "a manifest")
            if not isinstance(manifest, dict) or "manifests" not in manifest:
                break
            index = manifest
        else:
            raise refusal(self._where, "a manifest", "indexes of indexes", SAVE)
        layers = manifest.get("layers") if isinstance(manifest, dict) else None
        if not isinstance(layers, list):
            raise refusal(self._where, "a manifest with layers", repr(manifest)[:100], SAVE)
        for layer in layers:
            kind = str(layer.get("mediaType", "")) if isinstance(layer, dict) else ""
            if "encrypted" in kind or "foreign" in kind and not self._source.has(self._blob(layer, "a layer")[0]):
                raise refusal(f"{self._where}: a layer", "one that is in the archive, not encrypted", kind, SAVE)
            self._layers.append(self._blob(layer, "a layer"))
        return self._text(*self._blob(manifest.get("config"), "the configuration"))

    def _chosen(self, index: Any) -> Any:
        """Return the descriptor of the index for this machine."""
        found = index.get("manifests") if isinstance(index, dict) else None
        if not isinstance(found, list) or not all(isinstance(entry, dict) for entry in found):
            raise refusal(self._where, "an index with manifests", repr(index)[:100], SAVE)
        ours = MACHINES.get(platform.machine(), platform.machine())

        def platform_of(entry: Mapping[str, Any]) -> tuple[Any, Any]:
            told = entry.get("platform")
            return (told.get("os"), told.get("architecture")) if isinstance(told, dict) else ("linux", ours)

        fitting = [entry for entry in found if platform_of(entry) == ("linux", ours)]
        if len(fitting) == 1:
            return fitting[0]
        actual = f"{len(fitting)} of {len(found)}"
        raise refusal(self._where, f"one image for linux on {ours}", actual, "do: write the one image into an archive")

    def _of_docker(self) -> bytes:
        images = self._json(self._text("manifest.json"), "manifest.json")
        if not isinstance(images, list) or len(images) != 1 or not isinstance(images[0], dict):
            actual = f"{len(images)}" if isinstance(images, list) else repr(images)[:100]
            raise refusal(f"{self._where}: manifest.json", "one image", actual, "do: docker save NAME, with one name")
        config, layers = images[0].get("Config"), images[0].get("Layers")
        if not isinstance(config, str) or not isinstance(layers, list) or not all(isinstance(n, str) for n in layers):
            raise refusal(f"{self._where}: manifest.json", "Config and Layers", repr(images[0])[:100], SAVE)
        self._layers = [(name, "", -1) for name in layers]
        told = posixpath.basename(config).removesuffix(".json")
        return self._text(config, f"sha256:{told}" if DIGEST.fullmatch(f"sha256:{told}") else "")

    def _read_config(self, text: bytes) -> None:
        where = f"{self._where}: the configuration"
        told = self._json(text, "the configuration")
        try:
            self.diff_ids = tuple(map(str, told["rootfs"]["diff_ids"]))
            inner = told.get("config") or {}
            self.config = ImageConfig(
                environment=dict(str(entry).partition("=")[::2] for entry in inner.get("Env") or ()),
                folder=str(inner.get("WorkingDir") or ""),
                user=str(inner.get("User") or ""),
                entrypoint=tuple(map(str, inner.get("Entrypoint") or ())),
                command=tuple(map(str, inner.get("Cmd") or ())),
            )
            _check_config(self.config)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise refusal(where, "an image's configuration", f"{type(error).__name__}: {error}", SAVE) from error
        ours = MACHINES.get(platform.machine(), platform.machine())
        if (system := (told.get("os", "linux"), told.get("architecture", ours))) != ("linux", ours):
            raise refusal(where, f"an image for linux on {ours}", " on ".join(map(str, system)), "do: pull that one")
        if not 1 <= len(self.diff_ids) <= MOST_LAYERS or len(self.diff_ids) != len(self._layers):
            actual = f"{len(self.diff_ids)} there and {len(self._layers)} in the manifest"
            raise refusal(where, f"as many layers as in the manifest, 1 to {MOST_LAYERS}", actual, SAVE)
        if not all(map(DIGEST.fullmatch, self.diff_ids)):
            raise refusal(where, "digests of layers", repr(self.diff_ids)[:100], SAVE)
        self.digest = f"sha256:{hashlib.sha256(text).hexdigest()}"


def _check_config(config: ImageConfig) -> None:
    """Check that a process can have these variables and this folder.

    Raises:
        ValueError: a variable or the folder is invalid.
    """
    for text in (*config.environment, *config.environment.values(), config.folder):
        if b"\0" in text.encode():  # a lone surrogate is an error here
            raise ValueError("a NUL")
    if "" in config.environment:
        raise ValueError("a variable without a name")
    if config.folder and not config.folder.startswith("/"):
        raise ValueError(f"a working directory that is not absolute: {config.folder!r}")


class LayerStream(Checked):
    """Uncompressed bytes of a layer, which `finish` compares with both of its digests."""

    def __init__(self, file: BinaryIO, where: str, digest: str, size: int, diff_id: str, bounds: Bounds) -> None:
        self._blob = Checked(file, where, digest, size, SAVE) if digest else Checked(file, where, "", bounds.num_bytes)
        super().__init__(decompressed(cast(BinaryIO, self._blob), where), where, diff_id, bounds.num_bytes)
        self._compressed = file

    def finish(self) -> None:
        super().finish()
        self._blob.finish()

    def close(self) -> None:
        """Close the blob."""
        self._compressed.close()
        super().close()


@contextmanager
def opened(path: Path, bounds: Bounds, scratch: Path) -> Iterator[Archive]:
    """Open an archive: the folder of an OCI layout; or a tar of one, or of `docker save`, perhaps compressed.

    Args:
        scratch: folder in which a decompressed archive is kept, as a file without a name.

    Raises:
        BadInput: the path does not exist, or the archive is truncated, damaged or no image.
    """
    where = str(path)
    try:
        if os.path.isdir(path):
            yield Archive(SourceFolder(path), where, bounds)
            return
        remedy = "do: correct the path of the archive, a file or a folder that can be read"
        with (
            _opened_file(where, "an archive of an image", remedy) as file,
            tempfile.TemporaryFile(dir=scratch) as plain,
        ):
            stream = decompressed(file, where)
            if not isinstance(stream, io.BufferedReader):
                checked = Checked(stream, where, "", 2 * bounds.num_bytes)
                while piece := checked.read(PIECE_BYTES):
                    plain.write(piece)
                stream = cast(Any, plain)
            stream.seek(0)
            yield Archive(SourceTar(stream, where, bounds.num_entries), where, bounds)
    except CUT as error:
        raise refusal(where, "a whole archive of an image", f"{type(error).__name__}: {error}", SAVE) from error
