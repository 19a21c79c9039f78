"""Checks of the machines of a run: versions and kernels there, and the folders that they see."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from sparring.errors import refusal

NODE = "node"
"""Key of the node's name in `what_computes`."""


def compare(node: Mapping[str, str]) -> None:
    """Refuse a node whose versions or kernels (`what_computes`) differ from those of this process."""
    for name, value in what_computes().items():
        if name != NODE and node[name] != value:
            advice = "install the same there, or take nodes with processors like this one's"
            raise refusal(f"Ray node {node[NODE]}", f"{name} {value}, as in the run's process", node[name], advice)


def what_computes() -> dict[str, str]:
    """Return the versions and the kernel path of this process, and the name of this node. Versions and kernel path must
    be equal in a run, its engines and its ranks."""
    import platform
    from importlib.metadata import version

    import sparring
    from sparring.kernels import ops

    return {
        NODE: socket.gethostname(),
        "Python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "sparring": sparring.__version__,
        "kernel path": ops.path_name(),
    }


@contextmanager
def paths_to_see(folder: Path | None) -> Iterator[dict[str, str]]:
    """Yield the paths that all ranks must see, each with the folder that it tests: a temporary file in the run's
    `folder`, an absolute path, and the working folder. Without a folder (None) no path is needed: the ranks are on this
    machine."""
    if folder is None:
        yield {}
        return
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".seen-") as probe:
        yield {probe.name: str(folder), os.getcwd(): os.getcwd()}


def enter_folder(paths: Sequence[str]) -> list[str]:
    """Change to the run's working folder, the last of `paths`, if it exists here. Return the existing `paths`."""
    seen = [path for path in paths if Path(path).exists()]
    if paths and paths[-1] in seen:
        os.chdir(paths[-1])
    return seen


def check_sees(node: str, seen: Sequence[str], paths: Mapping[str, str]) -> None:
    """Refuse a node on which one of `paths`, from `paths_to_see`, is not in `seen`."""
    for path, folder in paths.items():
        if path not in seen:
            advice = "put it on a file system that all nodes share, or set cluster.ranks = 1"
            raise refusal(f"Ray node {node}", f"the folder {folder} of the run's machine, for ranks", "none", advice)
