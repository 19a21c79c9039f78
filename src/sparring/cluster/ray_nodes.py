"""Nodes of a Ray cluster, as a run needs them: what computes there, and what it sees."""

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
"""Key of a node's name in what it tells."""


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
    """Refuse a node on which something else computes than in this process."""
    for name, value in what_computes().items():
        if name != NODE and told[name] != value:
            do = "install the same there, or take nodes with processors like this one's"
            raise refusal(f"Ray node {told[NODE]}", f"{name} {value}, as in the run's process", told[name], do)


def what_computes() -> dict[str, str]:
    """Return what must be equal in the run's process and at its engines and ranks, and the name of this node."""
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
    """Show a folder, in which this process may write, and the working folder to the nodes."""
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
