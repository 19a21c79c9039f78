"""Ranks of a trainer on the nodes of a Ray cluster.

A call passes through three processes: Ray's client (`RankPlaces`), an actor on a node (`NodeProcess`) and its child,
the rank (`RankProcess`). Large data for all ranks, such as a batch, is put into Ray's object store once.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from dataclasses import dataclass
from functools import partial
from typing import Any

from sparring.cluster.config import ClusterConfig
from sparring.cluster.rank import RankEnded
from sparring.cluster.rank_process import END_S, RankProcess
from sparring.cluster.ray_nodes import NodeProcess
from sparring.errors import TrainerError, refusal

FEWER_S = 5.0
"""Seconds that Ray has to place ranks for each smaller number of ranks that is tried."""


@dataclass(slots=True, kw_only=True)
class PlacedRank:
    """Actor with a `RankProcess`.

    Attributes:
        where: the rank's name in messages.
        group: placement group of the trainer's ranks.
        threads: number of processors that the rank holds.
        for_engine: number of the engine for which the rank was ended; -1 for none.
    """

    actor: Any
    where: str
    group: Any
    threads: int
    ended: bool = False
    for_engine: int = -1

    def kill(self) -> None:
        """Kill the actor, and with it the rank."""
        import ray

        if not self.ended:
            self.ended = True
            with contextlib.suppress(ray.exceptions.RayError):
                ray.kill(self.actor)


class RankPlaces:
    """Ranks on a Ray cluster, used in the process of Ray's client. The methods block, and may run at the same time."""

    def __init__(self, config: ClusterConfig) -> None:
        self._config = config
        self._ranks: list[PlacedRank] = []
        self._fewer = 0  # ranks less than before, at the next replacement
        self._given: dict[int, Any] = {}
        self._numbers, self._one_at_a_time = itertools.count(1), threading.Lock()  # there may be several trainers

    def place(self, count: int, threads: int, replacing: bool) -> list[int]:
        """Place `count` ranks of `threads` processors, close to each other and on this machine first. If they replace
        other ranks, they may be fewer for lack of room. Return their numbers without waiting for their answer."""
        import ray
        from ray.util.placement_group import placement_group_table
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        if replacing:
            count, self._fewer = max(1, count - self._fewer), 0
        group, placed = self._group(count, threads, replacing)
        own, nodes = ray.get_runtime_context().get_node_id(), placement_group_table(group)["bundles_to_node_id"]
        order = sorted(range(placed), key=lambda nth: (nodes[nth] != own, nodes[nth], nth))
        made, remote = list[PlacedRank](), ray.remote(NodeProcess)
        for rank, nth in enumerate(order):
            place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=nth)
            actor = remote.options(num_cpus=threads, max_restarts=0, scheduling_strategy=place)
            process = actor.remote(partial(RankProcess, rank, self._config.timeout_s))
            where = f"rank {rank} of the trainer"
            made.append(PlacedRank(actor=process, where=where, group=group, threads=threads))
        with self._one_at_a_time:
            self._ranks += made
            return list(range(len(self._ranks) - placed, len(self._ranks)))

    def give(self, data: bytes, before: int) -> int:
        """Put data into Ray's object store, drop the data with the number `before`, and return the new number."""
        import ray

        self._given.pop(before, None)
        with self._one_at_a_time:
            number = next(self._numbers)
        self._given[number] = ray.put(data)
        return number

    def call(self, number: int, method: str, data: bytes | int) -> tuple[bytes, bytes]:
        """Call a method of a rank, as `Rank.call`. `data` is bytes, or the number that `give` has returned. Raises
        RankEnded if the rank or its actor has ended, or the rank gives no sign of life. Raises TrainerError if the
        actor refused the call."""
        import ray

        rank = self._ranks[number]
        argument = data if isinstance(data, bytes) else self._given[data]
        try:
            failure, answer = ray.get(rank.actor.call.remote("call", method, argument))
        except ray.exceptions.RayTaskError as error:
            kind = RankEnded if isinstance(error.cause, RankEnded) else TrainerError
            raise kind(str(error.cause)) from None
        except ray.exceptions.RayError as error:
            reason = " ".join(str(error).split()).partition(". ")[0].partition(" class_name:")[0]
            if rank.for_engine >= 0:
                reason = f"one that gave its processors to engine {rank.for_engine}, which had no place left"
            raise RankEnded(f"{rank.where}: expected an answer, got {reason}") from None
        return failure, answer

    def kill(self, number: int) -> None:
        """Kill a rank, even if it is stopped."""
        self._ranks[number].kill()

    def give_way(self, engine: int, processors: int) -> None:
        """Kill all ranks of the trainer with most ranks, to free `processors` for an engine. The trainer restarts with
        fewer ranks, which leave at least that many processors free. If no rank would be left for it, none is killed."""
        import ray

        groups = dict[int, list[PlacedRank]]()
        for rank in self._ranks:
            if not rank.ended:
                groups.setdefault(id(rank.group), []).append(rank)
        ranks = max(groups.values(), key=len, default=[])
        if not ranks or (fewer := -(-processors // ranks[0].threads)) >= len(ranks):
            return
        self._fewer = fewer
        for rank in ranks:
            rank.for_engine = engine
            rank.kill()
        ray.util.remove_placement_group(ranks[0].group)  # they would hold their places until the trainer's next call

    @property
    def processors(self) -> int:
        """Number of processors that ranks hold."""
        return sum(rank.threads for rank in self._ranks if not rank.ended)

    def end(self, number: int) -> None:
        """End a rank. With the last rank of a trainer, its placement group is removed. Safe to call twice."""
        import ray

        rank = self._ranks[number]
        with contextlib.suppress(ray.exceptions.RayError, ValueError):
            if not rank.ended:
                ray.get(rank.actor.call.remote("close"), timeout=END_S)
        rank.kill()
        if all(one.ended for one in self._ranks if one.group is rank.group):
            with contextlib.suppress(ray.exceptions.RayError, ValueError):
                ray.util.remove_placement_group(rank.group)

    def end_all(self) -> None:
        """Kill every rank that is still there."""
        for rank in self._ranks:
            rank.kill()

    def _group(self, count: int, threads: int, replacing: bool) -> tuple[Any, int]:
        """Return a placement group and its number of ranks. Raises BadInput if Ray cannot place the ranks in time."""
        import ray

        for fewer in range(count, 0, -1):
            within_s = self._config.wait_s if fewer == count else FEWER_S
            group = ray.util.placement_group([{"CPU": float(threads)}] * fewer, strategy="PACK")
            if group.wait(within_s):
                return group, fewer
            ray.util.remove_placement_group(group)
            if not replacing:
                break
        free = ray.available_resources().get("CPU", 0.0)
        raise refusal(
            "cluster.ranks",
            f"{count} ranks of {threads} CPUs on the Ray cluster within cluster.wait_s = {self._config.wait_s:g} s",
            f"{free:g} CPUs that are free",
            "lower cluster.ranks, cluster.rank_threads or cluster.engines, or add nodes",
        )
