"""`cluster.kind = "ray"`: engines of the policy on the nodes of a Ray cluster.

Ray places the engines, starts them again elsewhere when they or their node die, and says what the cluster has. Tokens
and weights travel over HTTP between the run and the engines, not through Ray.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections.abc import Sequence
from typing import Any

from sparring.cluster.config import ClusterConfig
from sparring.cluster.engine_process import DeadEngine, EngineProcess, serving
from sparring.errors import EngineError, refusal

OLDEST = (2, 52)
"""Oldest version of Ray with authentication by token."""

PAUSE_S = 1.0
"""Seconds between two questions for an engine that is being placed."""

CONNECT_S = 10.0
"""Seconds that the address of a Ray cluster has to take a connection."""


class RayEngine:
    """Engine process of a run on a node of a Ray cluster, in an actor that Ray starts again if its node dies.
    Implements `PlacedEngine`.

    Args:
        actor: handle of a `NodeEngine`.
        group: placement group of the actor and of those that are closed with it.
        number: number of the engine, for the user.
    """

    def __init__(self, actor: Any, group: Any, number: int) -> None:
        self._actor, self._group, self._number = actor, group, number

    def find(self, deadline: float) -> str:
        import ray

        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise EngineError(f"engine {self._number} on Ray: expected it to start, got no answer in time")
            try:
                return str(ray.get(self._actor.find.remote(left), timeout=left))
            except ray.exceptions.GetTimeoutError:
                continue
            except ray.exceptions.RayActorError:  # its node died; Ray starts it on another
                time.sleep(PAUSE_S)
            except ray.exceptions.RayTaskError as error:
                kind = DeadEngine if isinstance(error.cause, DeadEngine) else EngineError
                raise kind(f"engine {self._number} on Ray: {error.cause}") from error

    def kill(self) -> None:
        self._actor.kill.remote()

    def replied(self) -> None:
        self._actor.replied.remote()

    def close(self) -> None:
        import ray

        with contextlib.suppress(ray.exceptions.RayError):
            ray.kill(self._actor)
            ray.util.remove_placement_group(self._group)


class NodeEngine:
    """Actor on a node: a `sparring serve` on an address of the node, started again when it dies. The process ends with
    the actor, and the actor with the run.

    Args:
        words: arguments of `sparring serve` but for its address.
        key: key that clients send.
    """

    def __init__(self, words: Sequence[str], key: str) -> None:
        import ray

        self._process = EngineProcess(serving([*words, "--host", ray.util.get_node_ip_address()]), key)

    def find(self, within_s: float) -> str:
        """Wait until the server answers, and return its address. Raises as `EngineProcess.find`."""
        return self._process.find(time.monotonic() + within_s)

    def kill(self) -> None:
        """Kill the server that was found last, as `EngineProcess.kill`."""
        self._process.kill()

    def replied(self) -> None:
        """Begin to count deaths anew."""
        self._process.replied()


class RayEngines:
    """Engines of a run on a Ray cluster.

    Args:
        config: section `[cluster]`.

    Raises:
        BadInput: Ray is not installed, does not answer, or has fewer processors than the engines need.
    """

    def __init__(self, config: ClusterConfig, threads: int) -> None:
        self._config, self._threads = config, threads
        connect(config)
        self._check_resources()

    def start(self, words: Sequence[str], key: str) -> list[RayEngine]:
        """Place the engines and start them; return them before they answer.

        Raises:
            BadInput: Ray could not place them in time, or a node has other versions or kernels than this process.
        """
        import ray
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundles = [{"CPU": float(self._threads)}] * self._config.engines
        group = placement_group(bundles, strategy="SPREAD")
        if not group.wait(self._config.wait_s):
            raise self._refused(f"nothing placed within cluster.wait_s = {self._config.wait_s:g} s")
        strategies = [
            PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number)
            for number in range(self._config.engines)
        ]
        self._check_nodes(strategies)
        actor = ray.remote(NodeEngine)
        return [
            RayEngine(
                actor.options(
                    num_cpus=self._threads, max_restarts=-1, max_task_retries=0, scheduling_strategy=strategy
                ).remote(list(words), key),
                group,
                number,
            )
            for number, strategy in enumerate(strategies)
        ]

    def close(self) -> None:
        """Leave the cluster, which ends the actors and their placement group."""
        import ray

        ray.shutdown()

    def _check_resources(self) -> None:
        """Wait for the processors that the engines need, which Ray itself would do for ever.

        Raises:
            BadInput: they did not come in time.
        """
        import ray

        needed, deadline = self._threads * self._config.engines, time.monotonic() + self._config.wait_s
        while (there := ray.cluster_resources().get("CPU", 0.0)) < needed:
            if time.monotonic() > deadline:
                raise self._refused(f"{there:g}")
            time.sleep(PAUSE_S)

    def _refused(self, got: str) -> Exception:
        needed = f"{self._config.engines} engines of {self._threads} CPUs on the Ray cluster"
        return refusal("cluster.engines", needed, got, "lower cluster.engines or cluster.engine_threads, or add nodes")

    def _check_nodes(self, strategies: Sequence[Any]) -> None:
        """Compare versions and kernels of the nodes with those of this process.

        Raises:
            BadInput: a node differs.
        """
        import ray

        task, own = ray.remote(what_computes), what_computes()
        asked = [task.options(num_cpus=0, scheduling_strategy=strategy).remote() for strategy in strategies]
        for node in ray.get(asked):
            for name, value in own.items():
                if name != "node" and node[name] != value:
                    do = "install the same there, or take nodes with processors like this one's"
                    raise refusal(
                        f"Ray node {node['node']}", f"{name} {value}, as in the run's process", node[name], do
                    )


def connect(config: ClusterConfig) -> None:
    """Connect this process to a Ray cluster.

    Raises:
        BadInput: Ray is not installed or too old, or no cluster answers.
    """
    try:
        import ray
    except ImportError as error:
        raise refusal("cluster.kind", '"ray" with Ray installed', "none", "pip install 'sparring[ray]'") from error
    if tuple(map(int, ray.__version__.split(".")[:2])) < OLDEST:
        raise refusal("Ray", f"version {'.'.join(map(str, OLDEST))} or newer", ray.__version__, "install a newer one")
    if ray.is_initialized():
        return
    try:
        if (at := config.address.rpartition(":"))[1]:  # Ray itself tries an address without a cluster for minutes
            socket.create_connection((at[0], int(at[2])), CONNECT_S).close()
        ray.init(config.address, namespace="sparring", log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError) as error:
        do = "start one (`ray start --head`), or correct the address"
        raise refusal("cluster.address", f"a Ray cluster at {config.address}", str(error).split("\n")[0], do) from error


def what_computes() -> dict[str, str]:
    """Return what must be equal in the run's process and at its engines, and the name of this node."""
    import platform
    from importlib.metadata import version

    import sparring
    from sparring.kernels import ops

    return {
        "node": socket.gethostname(),
        "Python": platform.python_version(),
        "torch": version("torch"),
        "sparring": sparring.__version__,
        "kernel path": ops.path_name(),
    }
