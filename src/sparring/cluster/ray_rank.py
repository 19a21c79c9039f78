"""Ranks of a trainer as actors on the nodes of a Ray cluster.

A call passes through three processes: `ray.RayRank` in the run's, `RankActors` in that of Ray's client, and `NodeRank`
on a node. Method, data and answer are bytes all the way. What goes to all ranks, such as a batch, is given to Ray once.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sparring.allocator import share_freed_memory
from sparring.cluster.config import ClusterConfig
from sparring.cluster.rank import Rank, RankEnded
from sparring.cluster.rank_process import YOUNG_OBJECTS
from sparring.cluster.ray_nodes import NODE, answers, compare, seen_of, shown, what_computes
from sparring.errors import TrainerError, refusal

TICK_S = 1.0
"""Seconds between two questions for a sign of life."""
FEWER_S = 5.0
"""Seconds that Ray has to place each smaller number of ranks."""
END_S = 10.0
"""Seconds that an actor may take to end its trainer."""


class NodeRank:
    """Actor on a node with a rank. Its process ends with the actor, and the actor with the run."""

    def __init__(self) -> None:
        import ray

        gc.set_threshold(YOUNG_OBJECTS)
        share_freed_memory()
        self._rank = Rank(ray.util.get_node_ip_address())

    def begin(self, paths: Sequence[str]) -> tuple[dict[str, str], list[str], int]:
        """Go to the run's working folder, the last of the paths, if it is here. Return what computes here, which of the
        paths exist here, and the id of this process."""
        if (seen := seen_of(paths))[-1:] == [paths[-1]]:
            os.chdir(paths[-1])
        return what_computes(), seen, os.getpid()

    def call(self, method: str, data: bytes) -> tuple[bytes, bytes]:
        """Call a method of the rank, as `Rank.call`."""
        return self._rank.call(method, data)

    def lives(self) -> None:
        """Give a sign of life."""

    def close(self) -> None:
        """End the trainer."""
        self._rank.close()


@dataclass(slots=True, kw_only=True)
class PlacedRank:
    """Actor with a `NodeRank`.

    Attributes:
        group: placement group of the trainer's ranks.
        threads: processors that it holds.
        process: process id on its node; 0 before it has begun.
        for_engine: number of the engine to which it gave way; -1 if it did not.
    """

    actor: Any
    number: int
    node: str
    group: Any
    threads: int
    process: int = 0
    ended: bool = False
    for_engine: int = -1


class RankActors:
    """Actors of ranks, as Ray's client sees them. The methods block, and may run at the same time."""

    def __init__(self, config: ClusterConfig) -> None:
        self._config = config
        self._ranks: list[PlacedRank] = []
        self._fewer = 0  # ranks less than before, at the next replacement
        self._given: dict[int, Any] = {}
        self._numbers, self._one_at_a_time = itertools.count(1), threading.Lock()  # there may be several trainers

    def place(self, count: int, threads: int, folder: str, replacing: bool) -> list[int]:
        """Place ranks of `threads` processors, close to each other, those on this machine first; return their numbers
        before they answer.

        Args:
            folder: folder of the run, which every node with a rank must see.
            replacing: whether fewer may be placed if there is no room for more.
        """
        import ray
        from ray.util.placement_group import placement_group_table
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        if replacing:
            count, self._fewer = max(1, count - self._fewer), 0
        group, placed = self._group(count, threads, replacing)
        strategies = [
            PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=nth) for nth in range(placed)
        ]
        own, nodes = ray.get_runtime_context().get_node_id(), placement_group_table(group)["bundles_to_node_id"]
        order = sorted(range(placed), key=lambda nth: (nodes[nth] != own, nodes[nth], nth))
        actor = ray.remote(concurrency_groups={"life": 1})(NodeRank)
        made = [
            actor.options(num_cpus=threads, max_restarts=0, scheduling_strategy=strategies[nth]).remote()
            for nth in order
        ]
        with self._one_at_a_time:
            numbers = list(range(len(self._ranks), len(self._ranks) + placed))
            self._ranks += [
                PlacedRank(actor=each, number=number, node=nodes[nth], group=group, threads=threads)
                for number, (each, nth) in enumerate(zip(made, order, strict=True))
            ]
        try:
            self._begin([self._ranks[number] for number in numbers], folder)
        except BaseException:
            for number in numbers:
                self.kill(number)
                self.end(number)
            raise
        return numbers

    def give(self, data: bytes, before: int) -> int:
        """Put data into Ray's object store, drop the data with the number `before`, and return the new number."""
        import ray

        self._given.pop(before, None)
        with self._one_at_a_time:
            number = next(self._numbers)
        self._given[number] = ray.put(data)
        return number

    def call(self, number: int, method: str, data: bytes | int) -> tuple[bytes, bytes]:
        """Call a method of a rank, as `Rank.call`, with data or the number of what was given.

        Raises:
            RankEnded: the actor has ended, or stands still.
            TrainerError: the actor refused the call.
        """
        import ray

        rank = self._ranks[number]
        where = f"rank {rank.number} of the trainer"
        try:
            answer = rank.actor.call.remote(method, data if isinstance(data, bytes) else self._given[data])
            self._wait(rank, answer, where)
            failure, result = ray.get(answer)
        except ray.exceptions.RayTaskError as error:
            raise TrainerError(f"{where}: {error.cause}") from None
        except ray.exceptions.RayError as error:
            got = _first_sentence(error)
            if rank.for_engine >= 0:
                got = f"one that gave its processors to engine {rank.for_engine}, which had no place left"
            raise RankEnded(f"{where}: expected an answer, got {got}") from None
        return failure, result

    def kill(self, number: int) -> None:
        """Kill an actor, even if its process is stopped."""
        rank = self._ranks[number]
        if not rank.ended:
            rank.ended = True
            self._kill(rank)

    def give_way(self, engine: int, processors: int) -> None:
        """End the ranks of the trainer that has most, so that an engine finds `processors` for itself; those that
        replace them are fewer by as many processors. A trainer of one rank keeps it."""
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
            self.kill(rank.number)
        ray.util.remove_placement_group(ranks[0].group)  # they would hold their places until the trainer's next call

    @property
    def processors(self) -> int:
        """Number of processors that ranks hold."""
        return sum(rank.threads for rank in self._ranks if not rank.ended)

    def end(self, number: int) -> None:
        """End an actor; with the last of a trainer's, their places are given back. Safe to call twice."""
        import ray

        rank = self._ranks[number]
        if not rank.ended:
            rank.ended = True
            with contextlib.suppress(ray.exceptions.RayError):
                ray.get(rank.actor.close.remote(), timeout=END_S)
            self._kill(rank)
        if all(one.ended for one in self._ranks if one.group is rank.group):
            with contextlib.suppress(ray.exceptions.RayError, ValueError):
                ray.util.remove_placement_group(rank.group)

    def end_all(self) -> None:
        """Kill every actor that is still there."""
        for number in range(len(self._ranks)):
            self.kill(number)

    def _begin(self, ranks: Sequence[PlacedRank], folder: str) -> None:
        """Wait until actors have begun, and check what they tell of their nodes.

        Raises:
            RankEnded: one has ended.
            BadInput, EngineError: as `place`.
        """
        import ray

        with shown(folder) as sight:
            asked = [rank.actor.begin.remote(sight.paths) for rank in ranks]
            try:
                told = answers(asked, self._config.start_timeout_s)
            except ray.exceptions.RayError as error:
                got = _first_sentence(error)
                raise RankEnded(f"a rank of the trainer: expected it to start on Ray, got {got}") from None
        for rank, (computes, seen, process) in zip(ranks, told, strict=True):
            compare(computes)
            sight.check(computes[NODE], seen)
            rank.process = process

    def _group(self, count: int, threads: int, replacing: bool) -> tuple[Any, int]:
        """Return a placement group that Ray has placed, and its number of ranks.

        Raises:
            BadInput: Ray could not place it in time.
        """
        import ray

        for fewer in range(count, 0, -1):
            within_s = self._config.wait_s if fewer == count else FEWER_S
            group = ray.util.placement_group([{"CPU": float(threads)}] * fewer, strategy="PACK")
            if group.wait(within_s):
                return group, fewer
            ray.util.remove_placement_group(group)
            if not replacing:
                break
        there = ray.available_resources().get("CPU", 0.0)
        raise refusal(
            "cluster.ranks",
            f"{count} ranks of {threads} CPUs on the Ray cluster within cluster.wait_s = {self._config.wait_s:g} s",
            f"{there:g} CPUs that are free",
            "lower cluster.ranks, cluster.rank_threads or cluster.engines, or add nodes",
        )

    def _wait(self, rank: PlacedRank, answer: Any, where: str) -> None:
        """Wait for the answer of a call as long as its actor gives signs of life; raise RankEnded once it gives
        none."""
        import ray

        sign, heard = None, time.monotonic()
        while not ray.wait([answer], timeout=TICK_S)[0]:
            if sign is None:
                sign = rank.actor.lives.options(concurrency_group="life").remote()
            if ray.wait([sign], timeout=0)[0]:
                sign, heard = None, time.monotonic()
            elif time.monotonic() - heard > self._config.timeout_s:
                got = f"none for {self._config.timeout_s:g} s"
                raise RankEnded(f"{where}: expected a sign of life, got {got}")

    def _kill(self, rank: PlacedRank) -> None:
        """Kill the process of an actor by a signal, because a process that is stopped does not hear when Ray asks it to
        end."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        with contextlib.suppress(ray.exceptions.RayError):
            if rank.process:
                there = NodeAffinitySchedulingStrategy(rank.node, soft=False)
                ray.remote(_kill_process).options(num_cpus=0, scheduling_strategy=there).remote(rank.process)
            ray.kill(rank.actor)


def _kill_process(process: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


def _first_sentence(error: Exception) -> str:
    return " ".join(str(error).split()).partition(". ")[0].partition(" class_name:")[0]
