"""Client of a Ray cluster, in a process of its own: what Ray prints goes to that process's log, and a cluster that does
not answer blocks nothing of the run. `ray.RayProcess` starts it and calls the methods of `RayClient`.

Ray places engines and ranks, restarts engines on another node when their node dies, and reports the cluster's
resources. Tokens and weights travel over HTTP between run and engines, not through Ray. Calls of ranks travel through
Ray (`ray_ranks`).
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
from functools import partial
from multiprocessing.connection import Connection
from operator import attrgetter
from typing import Any, NamedTuple

from sparring.cluster.child import parents_socket
from sparring.cluster.config import ClusterConfig
from sparring.cluster.engine_process import DeadEngine, EngineProcess, serving
from sparring.cluster.ray_nodes import NodeProcess, check_nodes
from sparring.cluster.ray_ranks import RankPlaces
from sparring.errors import EngineError, SparringError, boundary, refusal

PAUSE_S = 1.0
"""Seconds between two attempts to reach an engine that Ray is placing."""

PLACE_S = 5.0
"""Seconds that Ray has to place an engine again, before ranks are ended to make room for it."""

END_S = 10.0
"""Seconds that ranks may take to be killed when the run has ended."""

CONNECT_S = 10.0
"""Seconds that the address of a Ray cluster has to take a connection."""


class EngineActor(NamedTuple):
    """Actor with an engine's process, and its placement group."""

    actor: Any
    group: Any


def engine_at(words: Sequence[str], key: str, host: str) -> EngineProcess:
    """Start a server at an address of this machine. `words`: arguments of `sparring serve` without the address."""
    return EngineProcess(serving([*words, "--host", host]), key)


class RayClient:
    """Calls of a run to Ray. Its methods block, and may run at the same time.

    Args:
        threads: processors of each engine.
        for_ranks: processors of the ranks of one trainer together.
    """

    def __init__(self, config: ClusterConfig, threads: int, for_ranks: int = 0) -> None:
        self._config, self._threads, self._for_ranks = config, threads, for_ranks
        self.ranks = RankPlaces(config)
        self._engines: list[EngineActor] = []

    def connect(self) -> None:
        """Connect this process to the cluster. Raises BadInput if no cluster answers at the address."""
        import ray

        address = self._config.address
        try:
            if (at := address.rpartition(":"))[1]:  # Ray itself tries an address without a cluster for minutes
                socket.create_connection((at[0], int(at[2])), CONNECT_S).close()
            ray.init(address, namespace="sparring", log_to_driver=False, logging_level=logging.ERROR)
        except (OSError, RuntimeError, ValueError) as error:
            advice = "start one (`ray start --head`), or correct the address"
            raise refusal(
                "cluster.address", f"a Ray cluster at {address}", str(error).split("\n")[0], advice
            ) from error

    def check_resources(self) -> int:
        """Wait for the processors that engines and ranks need, and return the number of nodes. Raises BadInput if the
        cluster does not have these processors in time; Ray itself would wait for ever."""
        import ray

        needed, deadline = self._threads * self._config.engines, time.monotonic() + self._config.wait_s
        needed += self._for_ranks
        while (there := ray.cluster_resources().get("CPU", 0.0)) < needed:
            if time.monotonic() > deadline:
                raise self._refused(f"{there:g}")
            time.sleep(PAUSE_S)
        return sum(bool(node["Alive"]) for node in ray.nodes())

    def start(self, words: Sequence[str], key: str) -> list[int]:
        """Place engines and start them. Return their numbers without waiting for their answer. Raises BadInput if Ray
        could not place them in time, or a node has other versions or kernels than this process."""
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
        check_nodes(strategies, self._config.start_timeout_s)
        first, make = len(self._engines), partial(engine_at, list(words), key)
        settings = {"num_cpus": self._threads, "max_restarts": -1, "max_task_retries": 0}
        for strategy in strategies:
            actor = ray.remote(NodeProcess).options(**settings, scheduling_strategy=strategy).remote(make)
            self._engines.append(EngineActor(actor, group))
        return list(range(first, len(self._engines)))

    def find(self, number: int, within_s: float, last: bool = False) -> str:
        """Return the address of an engine once its server answers, as `PlacedEngine.find`. If `last` and the engine
        finds no place, ranks are ended to make room for it (`RankPlaces.give_way`). Raises DeadEngine if the engine's
        process is not restarted any more. Raises EngineError if the engine did not start, or not in time."""
        import ray

        begun = time.monotonic()
        while (rest_s := begun + within_s - time.monotonic()) > 0:
            if last and time.monotonic() > begun + PLACE_S and not self._has_place(number):
                self.ranks.give_way(number, self._threads)
                last = False
            try:
                found = self._engines[number].actor.call.remote("find", rest_s)
                return str(ray.get(found, timeout=min(rest_s, PLACE_S)))
            except ray.exceptions.GetTimeoutError:
                continue
            except ray.exceptions.RayActorError:  # its node died; Ray starts it on another
                time.sleep(PAUSE_S)
            except ray.exceptions.RayTaskError as error:
                kind = DeadEngine if isinstance(error.cause, DeadEngine) else EngineError
                raise kind(f"engine {number} on Ray: {error.cause}") from None
        where = f"engine {number} on Ray: expected"
        if self._has_place(number):
            raise EngineError(f"{where} it to start, got no answer within {within_s:.0f} s")
        free, ranks = ray.available_resources().get("CPU", 0.0), self.ranks.processors
        there = f"{free:g} free on all nodes together, beside {ranks} of ranks"
        needed = f"a node with {self._threads} free CPUs for it"
        raise EngineError(f"{where} {needed}, got {there}; add nodes, and start again")

    def _has_place(self, number: int) -> bool:
        """Return whether Ray has a place for an engine: its placement group exists on a living node."""
        from ray.util.placement_group import placement_group_table

        return bool(placement_group_table(self._engines[number].group)["state"] == "CREATED")

    def tell(self, number: int, method: str) -> None:
        """Call `kill` or `replied` of an engine, through its actor, without waiting for the call to end."""
        self._engines[number].actor.call.remote(method)

    def end(self, number: int) -> None:
        """End an engine, and free the place of all engines in its placement group."""
        import ray

        with contextlib.suppress(ray.exceptions.RayError):
            ray.kill(self._engines[number].actor)
            ray.util.remove_placement_group(self._engines[number].group)

    def _refused(self, there: str) -> Exception:
        needed = f"{self._config.engines} engines of {self._threads} CPUs on the Ray cluster"
        keys, advice = "cluster.engines", "lower cluster.engines or cluster.engine_threads"
        if self._for_ranks:
            count = self._config.ranks
            needed += f" and {count} ranks of {self._for_ranks // count} CPUs"
            keys, advice = f"{keys} and cluster.ranks", f"{advice}, or cluster.ranks or cluster.rank_threads"
        return refusal(keys, needed, there, f"{advice}, or add nodes")


def serve(connection: Connection) -> None:
    """Answer the calls of a run until the run closes the connection or dies. The first message has the arguments of
    `RayClient`, and is answered once Ray is imported. Each later message is a number, a method and its arguments. The
    answer has the number, the result and the error; result or error is None."""
    import ray

    client, one_at_a_time = RayClient(*connection.recv()), threading.Lock()

    def answer(number: int, method: str, arguments: Sequence[Any]) -> None:
        result, failure = None, None
        try:
            with boundary(EngineError, f"Ray: {method}"):
                result = attrgetter(method)(client)(*arguments)
        except SparringError as error:
            failure = error
        with one_at_a_time, contextlib.suppress(OSError):  # the run has ended
            connection.send((number, result, failure))

    connection.send(ray.__version__)
    with contextlib.suppress(EOFError, OSError):
        while True:
            threading.Thread(target=answer, args=connection.recv(), daemon=True).start()
    ending = threading.Thread(target=client.ranks.end_all, daemon=True)
    ending.start()
    ending.join(END_S)  # a cluster that does not answer must not keep this process


def main() -> None:
    """Serve the parent's connection, then leave the cluster, which ends engines and ranks."""
    serve(Connection(parents_socket()))
    sys.modules["ray"].shutdown()
    os._exit(0)  # a call may still wait for Ray
