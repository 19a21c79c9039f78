"""Client of a Ray cluster, in a process of its own: what Ray prints goes to that process's log, and a cluster that does
not answer blocks nothing of the run. `ray.RayProcess` starts it and calls the methods of `RayClient`.

Ray places the engines, starts them again elsewhere when they or their node die, and says what the cluster has. Tokens
and weights travel over HTTP between the run and the engines, not through Ray.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from sparring.cluster.config import ClusterConfig
from sparring.cluster.engine_process import DeadEngine, EngineProcess, serving
from sparring.errors import EngineError, SparringError, boundary, refusal

PAUSE_S = 1.0
"""Seconds between two questions for an engine that is being placed."""

CONNECT_S = 10.0
"""Seconds that the address of a Ray cluster has to take a connection."""


class EngineActor(NamedTuple):
    """Actor with a `NodeEngine`, and its placement group."""

    actor: Any
    group: Any


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


class RayClient:
    """Calls of a run to Ray. Its methods block, and may run at the same time.

    Args:
        config: section `[cluster]`.
        threads: processors of each engine.
    """

    def __init__(self, config: ClusterConfig, threads: int) -> None:
        self._config, self._threads = config, threads
        self._engines: list[EngineActor] = []

    def connect(self) -> None:
        """Connect this process to the cluster.

        Raises:
            BadInput: no cluster answers.
        """
        import ray

        address = self._config.address
        try:
            if (at := address.rpartition(":"))[1]:  # Ray itself tries an address without a cluster for minutes
                socket.create_connection((at[0], int(at[2])), CONNECT_S).close()
            ray.init(address, namespace="sparring", log_to_driver=False, logging_level=logging.ERROR)
        except (OSError, RuntimeError, ValueError) as error:
            do = "start one (`ray start --head`), or correct the address"
            raise refusal("cluster.address", f"a Ray cluster at {address}", str(error).split("\n")[0], do) from error

    def check_resources(self) -> None:
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

    def start(self, words: Sequence[str], key: str) -> list[int]:
        """Place engines and start them; return their numbers before they answer.

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
        first = len(self._engines)
        self._engines += [
            EngineActor(
                actor.options(
                    num_cpus=self._threads, max_restarts=-1, max_task_retries=0, scheduling_strategy=strategy
                ).remote(list(words), key),
                group,
            )
            for strategy in strategies
        ]
        return list(range(first, len(self._engines)))

    def find(self, number: int, within_s: float) -> str:
        """Return the address of an engine, as soon as Ray has placed its actor and it answers.

        Raises:
            DeadEngine: it is not started any more.
            EngineError: it did not start, or is late.
        """
        import ray

        deadline = time.monotonic() + within_s
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise EngineError(f"engine {number} on Ray: expected it to start, got no answer in time")
            try:
                return str(ray.get(self._engines[number].actor.find.remote(left), timeout=left))
            except ray.exceptions.GetTimeoutError:
                continue
            except ray.exceptions.RayActorError:  # its node died; Ray starts it on another
                time.sleep(PAUSE_S)
            except ray.exceptions.RayTaskError as error:
                kind = DeadEngine if isinstance(error.cause, DeadEngine) else EngineError
                raise kind(f"engine {number} on Ray: {error.cause}") from None

    def kill(self, number: int) -> None:
        """Let an actor kill the process that was found last."""
        self._engines[number].actor.kill.remote()

    def replied(self, number: int) -> None:
        """Let an actor begin to count deaths anew."""
        self._engines[number].actor.replied.remote()

    def end(self, number: int) -> None:
        """End an engine, and those that were placed with it."""
        import ray

        with contextlib.suppress(ray.exceptions.RayError):
            ray.kill(self._engines[number].actor)
            ray.util.remove_placement_group(self._engines[number].group)

    def _refused(self, got: str) -> Exception:
        needed = f"{self._config.engines} engines of {self._threads} CPUs on the Ray cluster"
        return refusal("cluster.engines", needed, got, "lower cluster.engines or cluster.engine_threads, or add nodes")

    def _check_nodes(self, strategies: Sequence[Any]) -> None:
        """Compare versions and kernels of the nodes with those of this process.

        Raises:
            BadInput: a node differs.
            EngineError: a node does not answer in time.
        """
        import ray

        task, own = ray.remote(what_computes), what_computes()
        asked = [task.options(num_cpus=0, scheduling_strategy=strategy).remote() for strategy in strategies]
        try:
            nodes = ray.get(asked, timeout=self._config.start_timeout_s)
        except ray.exceptions.GetTimeoutError:
            got = f"no answer within cluster.start_timeout_s = {self._config.start_timeout_s:g} s"
            raise EngineError(f"Ray: expected every node to tell its versions, got {got}") from None
        for node in nodes:
            for name, value in own.items():
                if name != "node" and node[name] != value:
                    do = "install the same there, or take nodes with processors like this one's"
                    raise refusal(
                        f"Ray node {node['node']}", f"{name} {value}, as in the run's process", node[name], do
                    )


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


def serve(connection: Connection) -> None:
    """Answer the calls of a run until it closes the connection or dies. The first message is the arguments of
    `RayClient`, and is answered once Ray is imported. Each other one is a number, a method and its arguments, and is
    answered by the number, the result and the error, of which one is None."""
    import ray

    client, one_at_a_time = RayClient(*connection.recv()), threading.Lock()

    def answer(number: int, method: str, arguments: Sequence[Any]) -> None:
        result, failure = None, None
        try:
            with boundary(EngineError, f"Ray: {method}"):
                result = getattr(client, method)(*arguments)
        except SparringError as error:
            failure = error
        with one_at_a_time, contextlib.suppress(OSError):  # the run has ended
            connection.send((number, result, failure))

    connection.send(ray.__version__)
    with contextlib.suppress(EOFError, OSError):
        while True:
            threading.Thread(target=answer, args=connection.recv(), daemon=True).start()


def main() -> None:
    """Serve the connection whose descriptor is the program's argument, then leave the cluster, which ends the
    engines."""
    serve(Connection(int(sys.argv[1])))
    sys.modules["ray"].shutdown()
    os._exit(0)  # a call may still wait for Ray
