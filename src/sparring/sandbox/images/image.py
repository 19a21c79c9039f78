"""An image as the store describes it, and the bounds of what an archive may hold."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec


class ImageConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What an image says about the programs that run in it.

    Attributes:
        environment: variables.
        folder: working directory; "" if the image names none.
        user: user as the image writes it: a name or a number, perhaps with a group after a colon; "" if it names none.
        entrypoint: program and first arguments that every command is given to.
        command: default command.
    """

    environment: Mapping[str, str] = {}
    folder: str = ""
    user: str = ""
    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()


class Image(msgspec.Struct, frozen=True, kw_only=True):
    """A pulled image.

    Attributes:
        name: its name in this store.
        digest: digest of its configuration, `sha256:...`, which covers the content of every layer.
        layers: names of its layers' folders, lowest first.
        config: what it says about its programs.
        num_bytes: bytes of its files.
        num_entries: number of its files, folders and links.
        left_out: number of devices, which boxes do not have.
    """

    name: str
    digest: str
    layers: tuple[str, ...]
    config: ImageConfig
    num_bytes: int
    num_entries: int
    left_out: int


class UnpackedImage(NamedTuple):
    """What a box needs of an image.

    Attributes:
        layers: folders of its layers, lowest first, as overlayfs stacks them.
        config: what it says about its programs.
    """

    layers: tuple[Path, ...]
    config: ImageConfig = ImageConfig()


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """Most that one image may hold.

    Attributes:
        num_bytes: bytes of its files and, apart from that, bytes of its decompressed layers.
        num_entries: number of its files, folders and links.
    """

    num_bytes: int = 32 << 30
    num_entries: int = 500_000
