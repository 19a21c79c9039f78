"""Roots of boxes, below the files that a box writes: the host's programs, or the layers of an image."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparring.errors import BadInput, refusal
from sparring.sandbox.images.image import UnpackedImage
from sparring.sandbox.images.layer_holds import HeldLayers
from sparring.sandbox.mounts import check_mounts
from sparring.types import BoxSpec

ImageOf = Callable[[str], UnpackedImage]
"""Function from an image's name to the unpacked image. Raises BadInput for an unknown name."""

HOST_IMAGES = ("python", "host")
"""Images whose programs are the host's."""
SHOWN = "/layers"
"""Folder of a fork server that shows the folders in which layers lie. No command sees it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Root:
    """Root of a box.

    Attributes:
        kind: "python": the host's programs; only the box's own folders can be written. "host": the same, with a
            writable overlay. "layers": an image.
        layers: unpacked layers of the image, lowest first.
        folder: working folder of commands.
        variables: variables of commands, in addition to those of every box, by name.
    """

    kind: str = "python"
    layers: tuple[Path, ...] = ()
    folder: str = "/box"
    variables: tuple[tuple[str, str], ...] = ()

    @property
    def folders(self) -> tuple[Path, ...]:
        """Folders that contain the layers; one fork server makes boxes of every image in them."""
        return tuple(sorted({layer.parent for layer in self.layers}))

    def program_environment(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of an agent program: its own, and below it an image's variables, whose PATH is
        searched last."""
        variables = dict(self.variables)
        searched = [paths for paths in (environment.get("PATH"), variables.get("PATH")) if paths]
        return {**variables, **environment, **({"PATH": ":".join(searched)} if searched else {})}

    def limits(self) -> dict[str, Any]:
        """Return the part of a box's first request that describes the root; `inner.root` reads it."""
        places = {folder: f"{SHOWN}/{number}" for number, folder in enumerate(self.folders)}
        layers = [f"{places[layer.parent]}/{layer.name}" for layer in self.layers]
        return {"image": self.kind, "layers": layers, "variables": dict(self.variables)}


def root_of(spec: BoxSpec, image_of: ImageOf, holds: HeldLayers, user: int) -> Root:
    """Return the root that a box of this spec has.

    Args:
        holds: keeps the layers from deletion.
        user: `sandbox.user`, who must be able to read the layers.

    Raises:
        BadInput: the image does not exist, or its layers are gone or cannot be mounted.
    """
    if spec.image in HOST_IMAGES:
        return Root(kind=spec.image)
    layers, config = image_of(spec.image)
    if not layers:
        raise refusal("box.image", "an image with layers", f"{spec.image!r} without any", "do: pull it again")
    root = Root(
        kind="layers",
        layers=tuple(Path(os.path.realpath(layer)) for layer in layers),
        folder=config.folder or "/box",
        variables=tuple(config.environment.items()),
    )
    holds.add(root.layers)
    check_mounts({f"{SHOWN}/{number}": str(folder) for number, folder in enumerate(root.folders)}, "box.image", user)
    return root


def stored_image(name: str, user: int) -> UnpackedImage:
    """Return a pulled image, whose layers belong to `sandbox.user`.

    Raises:
        BadInput: no image has this name.
    """
    from sparring.sandbox.images.store import ImageStore

    try:
        return ImageStore(user=user).unpacked(name)
    except BadInput as error:
        expected = "'python', 'host' or the name of an image that was pulled"
        raise refusal("box.image", expected, repr(name), str(error)) from error


def site_packages() -> Iterator[Path]:
    """Yield the folders of the host's Python packages below /usr, which boxes do not see."""
    for folder in (Path("/usr/lib"), Path("/usr/local/lib")):
        for packages in (*folder.glob("python3*/dist-packages"), *folder.glob("python3*/site-packages")):
            if packages.is_dir() and not packages.is_symlink():
                yield packages
