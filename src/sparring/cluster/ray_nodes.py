"""Checks of the nodes of a Ray cluster: versions and kernels there, and the folders that they see."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sparring.errors import EngineError, refusal

NODE = "node"
"""Key of the node's name in `what_computes`."""


def check_nodes(strategies: Sequence[Any], within_s: float) -> None:
    """Compare versions and kernels of nodes with those of this process. `strategies`: how Ray schedules a task on each
    node."""
    import ray

    remote = ray.remote(what_computes)
    asked = [remote.options(num_cpus=0, scheduling_strategy=strategy).remote() for strategy in strategies]
    for told in answers(asked, within_s):
        compare(told)


def answers(asked: Sequence[Any], within_s: float) -> list[Any]:
    """Return what nodes answer.

    Raises:
        EngineError: a node does not answer in time.
    """
    import ray

    try:
        return list(ray.get(list(asked), timeout=within_s))
    except ray.exceptions.GetTimeoutError:
        got = f"no answer within cluster.start_timeout_s = {within_s:g} s"
        raise EngineError(f"Ray: expected every node to answer, got {got}") from None


def compare(told: Mapping[str, str]) -> None:
    """Refuse a node whose versions or kernels (`what_computes`) differ from those of this process."""
    for name, value in what_computes().items():
        if name != NODE and told[name] != value:
            do = "install the same there, or take nodes with processors like this one's"
            raise refusal(f"Ray node {told[NODE]}", f"{name} {value}, as in the run's process", told[name], do)


def what_computes() -> dict[str, str]:
    """Return the versions and the kernel path of this process, which must be equal in a run, at its engines and at its
    ranks, and the name of this node."""
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
def shown(folder: str) -> Iterator[Sight]:
    """Write a probe file into a folder, and yield the paths that the nodes must see while it exists."""
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".seen-") as probe:
        yield Sight(folder, (probe.name, os.getcwd()))


class Sight:
    """Paths that every node must see: a file that was just made in `folder` (an absolute path), and the working
    folder."""

    def __init__(self, folder: str, paths: tuple[str, str]) -> None:
        self.folder, self.paths = folder, paths

    def check(self, node: str, seen: Sequence[str]) -> None:
        """Refuse a node that does not see all of the paths."""
        for path, at in zip(self.paths, (self.folder, self.paths[1]), strict=True):
            if path not in seen:
                do = "put it on a file system that all nodes share, or set cluster.ranks = 1"
                raise refusal(f"Ray node {node}", f"the folder {at} of the run's machine, for ranks", "none", do)


def seen_of(paths: Sequence[str]) -> list[str]:
    """Return those of the paths that exist here."""
    return [path for path in paths if Path(path).exists()]
