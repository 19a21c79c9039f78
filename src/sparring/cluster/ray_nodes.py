"""Processes of a run on the nodes of a Ray cluster, and a check of the nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sparring.cluster.nodes import compare, what_computes
from sparring.errors import EngineError


class NodeProcess:
    """Actor on a node that starts a process there. The process ends with the actor, and the actor with the run.

    Args:
        make: function of the node's address that starts the process.
    """

    def __init__(self, make: Callable[[str], Any]) -> None:
        import ray

        self._process = make(ray.util.get_node_ip_address())

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the process's object, and return its result."""
        return getattr(self._process, method)(*arguments)


def check_nodes(strategies: Sequence[Any], within_s: float) -> None:
    """Raise BadInput for a node whose versions or kernels differ from those of this process, and EngineError for a node
    that does not answer in time. `strategies`: Ray's scheduling strategy for a task on each node."""
    import ray

    remote = ray.remote(what_computes)
    asked = [remote.options(num_cpus=0, scheduling_strategy=strategy).remote() for strategy in strategies]
    try:
        answers = ray.get(asked, timeout=within_s)
    except ray.exceptions.GetTimeoutError:
        silence = f"no answer within cluster.start_timeout_s = {within_s:g} s"
        raise EngineError(f"Ray: expected every node to answer, got {silence}") from None
    for answer in answers:
        compare(answer)
