"""Descriptions of pulled images, and bounds on an archive's content."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec


class ImageConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Configuration of the programs that run in an image.

    Attributes:
        environment: variables.
        folder: working directory; "" if the image names none.
        user: user as the image writes it: a name or a number, perhaps with a group after a colon; "" if it names none.
        entrypoint: program and first arguments that are put in front of every command.
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
        config: configuration of its programs.
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
    """Parts of an image that a box needs.

    Attributes:
        layers: folders of the image's layers, lowest first, as overlayfs stacks them.
        config: configuration of the image's programs.
    """

    layers: tuple[Path, ...]
    config: ImageConfig = ImageConfig()


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """Upper bounds on one image.

    Attributes:
        num_bytes: bytes of its files; the same bound holds for the bytes of its decompressed layers.
        num_entries: number of its files, folders and links.
    """

    num_bytes: int = 32 << 30
    num_entries: int = 500_000
