"""Store of pulled images: layers by the digest of their content and of all below them, unpacked once and shared.

    images/NAME.json       an image: names of its layers, configuration of its programs; NAME has + for each /
    layers/DIGEST          an unpacked layer; never changed
    counts/DIGEST          bytes, entries and devices of the layer
    making/XXXX            a layer that a pull unpacks or a removal deletes; locked by its process
    lock                   held while images are written or removed

A complete layer or image is renamed into its place. So a killed pull leaves nothing but a folder in `making`, which the
next pull or removal deletes.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO, cast

import msgspec

from sparring.errors import refusal
from sparring.sandbox.config import BOX_USER
from sparring.sandbox.images.image import Bounds, Image, UnpackedImage
from sparring.sandbox.images.layer_holds import hold
from sparring.sandbox.images.source import Archive, opened
from sparring.sandbox.images.streams import TarStream
from sparring.sandbox.images.unpack import LayerTree, is_base
from sparring.sandbox.mounts import box_identity, check_box_user, unreadable_part
from sparring.scratch import scratch
from sparring.user_cache import user_cache

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,127}")
FOLDERS = ("images", "layers", "counts", "making")
RESERVED = ("python", "host")
"""Names of the built-in roots, which no pulled image can have."""
SYSTEM_FOLDER = Path("/var/cache/sparring/images")
"""Folder of the store if Sparring is root: boxes run as another user, who cannot enter root's home."""
DIGITS = 32
"""Hexadecimal digits of a layer's digest in the name of its folder: the options of a mount are short."""

Counts = tuple[int, int, int]
"""Bytes, entries and devices of a layer, as its folder has them."""


def store_folder(user: int = BOX_USER) -> Path:
    """Return the folder of this user's images: `images` in the user's cache, or for root `SYSTEM_FOLDER`, unless
    XDG_CACHE_HOME is set."""
    if box_identity(user) and not Path(os.environ.get("XDG_CACHE_HOME", "")).is_absolute():
        return SYSTEM_FOLDER
    return user_cache("images")


class ImageStore:
    """Images in a folder.

    Args:
        folder: by default the folder of the user that Sparring runs as.
        user: `sandbox.user`. If Sparring is root, the layers belong to this user; only root and this user can enter.
    """

    def __init__(self, folder: Path | None = None, user: int = BOX_USER) -> None:
        self.folder = store_folder(user) if folder is None else folder
        self._user, self._identity = user, box_identity(user)
        self._images, self._layers, self._counts, self._making = (self.folder / name for name in FOLDERS)

    def image(self, name: str) -> Image:
        """Return a pulled image.

        Raises:
            BadInput: no image has this name.
        """
        try:
            return msgspec.json.decode(self._file(name).read_bytes(), type=Image)
        except FileNotFoundError:
            known = ", ".join(image.name for image in self.images()) or "none"
            remedy = f"do: sparring image pull FILE --as {name} (with the boxes alone: sparring-boxes image pull ...)"
            raise refusal(f"image {name!r}", f"one that was pulled ({known})", "no such image", remedy) from None

    def unpacked(self, name: str) -> UnpackedImage:
        """Return the parts of a pulled image that a box needs.

        Raises:
            BadInput: no image has this name, or its layers belong to another user.
        """
        image = self.image(name)
        self._check_owner()
        return UnpackedImage(self.layers(image), image.config)

    def images(self) -> list[Image]:
        """Return every image, sorted by name."""
        images = []
        for file in sorted(self._images.glob("*.json")):
            try:
                images.append(msgspec.json.decode(file.read_bytes(), type=Image))
            except FileNotFoundError:
                pass  # it has just been removed
        return images

    def layers(self, image: Image) -> tuple[Path, ...]:
        """Return the folders of an image's layers, lowest first."""
        return tuple(self._layers / layer for layer in image.layers)

    def pull(
        self, archive: Path, name: str, bounds: Bounds | None = None, told: Callable[[str], None] = lambda text: None
    ) -> Image:
        """Unpack the layers of an archive that the store lacks, and name the image.

        Args:
            archive: folder of an OCI layout, or a tar of one or of `docker save`.
            told: called with a line for every layer.

        Raises:
            BadInput: the name is invalid, or another image has it; the archive is damaged or exceeds `bounds`; or the
                boxes' user cannot enter the store.
        """
        bounds = bounds or Bounds()
        file = self._file(name)
        self._make_folders()
        with scratch(self._making) as made, opened(archive, bounds, made) as source, ExitStack() as locks:
            layers, counts = self._unpacked(source, bounds, told, locks)
            image = Image(
                name=name,
                digest=source.digest,
                layers=layers,
                config=source.config,
                num_bytes=counts[0],
                num_entries=counts[1],
                left_out=counts[2],
            )
            with self._locked():
                earlier = self.image(name) if file.exists() else image
                if earlier.digest != image.digest:
                    remedy = "do: choose another name, or remove that image first"
                    raise refusal(f"image {name!r}", "a name that is free", f"that of {earlier.digest}", remedy)
                part = made / "image"
                part.write_bytes(msgspec.json.encode(image))
                part.chmod(0o644)
                os.replace(part, file)
            return image

    def remove(self, name: str) -> int:
        """Remove an image, and the layers that no other image and no box uses. Return their number.

        Raises:
            BadInput: no image has this name.
        """
        self.image(name)
        with scratch(self._making) as made, self._locked():
            self._file(name).unlink(missing_ok=True)  # another removal may have been faster
            used = {layer for image in self.images() for layer in image.layers}
            count = 0
            for layer in [path for path in self._layers.iterdir() if path.name not in used]:
                lock = os.open(layer, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    layer.rename(made / layer.name)
                    (self._counts / layer.name).unlink(missing_ok=True)
                    count += 1
                except BlockingIOError:
                    pass  # a box stands on it; a later removal takes it
                finally:
                    os.close(lock)
            return count

    def _unpacked(
        self, source: Archive, bounds: Bounds, told: Callable[[str], None], locks: ExitStack
    ) -> tuple[tuple[str, ...], Counts]:
        """Return the names of an archive's layers, unpacked and held, and their bytes, entries and devices together."""
        names: list[str] = []
        chain, counts = "", (0, 0, 0)
        for at, diff_id in enumerate(source.diff_ids):
            chain = f"sha256:{hashlib.sha256(f'{chain} {diff_id}'.encode()).hexdigest()}" if chain else diff_id
            name, done = chain.partition(":")[2][:DIGITS], "here already"
            rest = Bounds(num_bytes=bounds.num_bytes - counts[0], num_entries=bounds.num_entries - counts[1])
            while not hold(self._layers / name, locks):
                self._unpack(source, at, name, names, rest)
                done = "unpacked"
            size, entries, devices = msgspec.json.decode((self._counts / name).read_bytes(), type=Counts)
            counts = (counts[0] + size, counts[1] + entries, counts[2] + devices)
            if counts[0] > bounds.num_bytes or counts[1] > bounds.num_entries:
                actual = f"{counts[0]} bytes in {counts[1]}"
                expected = f"at most {bounds.num_bytes} bytes in {bounds.num_entries} files"
                remedy = "if you trust it, allow more (--most-bytes, --most-files)"
                raise refusal(f"layer {at + 1}", expected, actual, remedy)
            names = [name] if is_base(self._layers / name) else [*names, name]
            told(f"layer {at + 1} of {len(source.diff_ids)}: {done}: {entries:,} files, {size / 1e6:,.1f} MB")
        return tuple(names), counts

    def _unpack(self, source: Archive, at: int, name: str, below: Sequence[str], bounds: Bounds) -> None:
        """Unpack one layer and rename it into its place, unless another pull was faster."""
        owner = (self._user, self._user) if self._identity else None
        where, stream = source.layer(at)
        with stream, scratch(self._making) as made:
            tree, counts = made / "layer", made / "counts"
            tree.mkdir()
            lower = [self._layers / layer for layer in reversed(below)]
            layer = LayerTree(tree, lower, owner, bounds)
            layer.unpack(TarStream(cast(BinaryIO, stream), where))
            stream.finish()
            counts.write_bytes(msgspec.json.encode((layer.num_bytes, layer.num_entries, layer.left_out)))
            counts.rename(self._counts / name)
            try:
                tree.rename(self._layers / name)
            except OSError:
                if not (self._layers / name).is_dir():
                    raise

    def _file(self, name: str) -> Path:
        remedy = "do: choose one such as debian:12"
        if name in RESERVED:
            actual = f"{name!r}, which is taken: boxes with the host's programs have it"
            raise refusal("an image's name", "a name that is free", actual, remedy)
        if not NAME.fullmatch(name):
            expected = "letters, digits and . _ : / @ -, at most 128, the first a letter or digit"
            raise refusal("an image's name", expected, repr(name), remedy)
        return self._images / f"{name.replace('/', '+')}.json"

    def _make_folders(self) -> None:
        """Make the store, and check that of all users but root only the boxes' user can enter it."""
        check_box_user(self._user)
        for path in filter(Path.is_dir, self.folder.resolve().parents if self._identity else ()):
            kind = path.stat()
            if kind.st_uid or kind.st_mode & 0o1002 == 0o002:
                actual = f"{path} of user {kind.st_uid}, mode {kind.st_mode & 0o7777:04o}"
                remedy = "do: set XDG_CACHE_HOME to a folder of root's"
                raise refusal(str(self.folder), "a place that only root can change", actual, remedy)
        try:
            for folder in (self.folder.parent, self.folder, *(self.folder / name for name in FOLDERS)):
                is_closed = self._identity and folder == self.folder
                is_part = folder.parent == self.folder or is_closed and not self._layers.is_dir()
                if is_part or not folder.is_dir():  # another pull may have made it, and have yet to open it
                    folder.mkdir(0o700 if is_closed else 0o755, parents=True, exist_ok=True)
                    if is_closed:
                        os.chown(folder, 0, self._user)
                    folder.chmod(0o710 if is_closed else 0o755)
        except OSError as error:
            remedy = "do: set XDG_CACHE_HOME to a folder of yours"
            raise refusal(str(self.folder), "a folder for images", error.strerror or str(error), remedy) from error
        self._check_owner()
        if (closed := unreadable_part(self._layers, self._user)) is not None:
            expected = f"a folder that user {self._user}, whom boxes run as, can enter"
            remedy = f"do: chmod o+x {closed}, or set XDG_CACHE_HOME to another folder"
            raise refusal(str(self.folder), expected, f"mode {closed.stat().st_mode & 0o7777:04o} of {closed}", remedy)

    def _check_owner(self) -> None:
        """Refuse a store of another user than the boxes', or one that others can enter."""
        kind = self.folder.stat()
        if self._identity and (kind.st_uid, kind.st_gid, kind.st_mode & 0o7) != (0, self._user, 0):
            expected = f"a folder that only root and the boxes' group {self._user} can enter"
            actual = f"one of user {kind.st_uid} and group {kind.st_gid}, mode {kind.st_mode & 0o7777:04o}"
            remedy = "do: remove it and pull its images again, or set sandbox.user to that group"
            raise refusal(str(self.folder), expected, actual, remedy)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with open(self.folder / "lock", "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
