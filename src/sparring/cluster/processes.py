"""`cluster.kind = "local"` and `"ray"`: engines of the policy, and ranks of trainers, in processes of their own."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from sparring.cluster.config import ClusterConfig
from sparring.cluster.engine_process import EngineProcess
from sparring.cluster.inline import InlineCluster
from sparring.engine.config import EngineConfig
from sparring.errors import EngineError, refusal
from sparring.protocols import Engine, Trainer, TrainPlan
from sparring.types import POLICY

if TYPE_CHECKING:
    from sparring.cluster.ray import RayEngines
    from sparring.engine.adapters.remote import RemoteEngine

_log = logging.getLogger("sparring.engine")


class PlacedEngine(Protocol):
    """Engine process, wherever it runs."""

    url: str

    def wait_until_ready(self, deadline: float) -> None:
        """Wait for the first answer, until `deadline` by `time.monotonic`. Raises EngineError."""

    def find(self, deadline: float) -> str:
        """Return the address of the server, which may have been started again elsewhere. Raises EngineError."""

    def kill(self) -> None:
        """Kill a process that stands still; another one is started."""

    def close(self) -> None:
        """End the process. Safe to call twice."""


class ProcessCluster(InlineCluster):
    """Cluster whose engines of the policy are processes, and so are the ranks of its trainers if there are several; all
    else is in this process. Implements `protocols.Cluster`.

    Args:
        cluster: section `[cluster]`.
        settings: arguments of `InlineCluster`.
    """

    def __init__(self, cluster: ClusterConfig, **settings: Any) -> None:
        super().__init__(**settings)
        self._cluster = cluster
        self._placed: list[PlacedEngine] = []
        self._ray: RayEngines | None = None

    def check(self) -> list[str]:
        number = self._cluster.engines
        if self._device != "cpu":
            raise refusal("run.device", f'"cpu" with cluster.kind "{self._cluster.kind}"', self._device, "set it")
        if self._cluster.kind == "local":
            there = f"cluster: {number} engine processes of {self._engine_threads} threads on this machine"
            return [there, *self._check_ranks()]
        from sparring.cluster.ray import RayEngines

        engines = RayEngines(self._cluster, self._engine_threads)
        try:
            return [f"cluster: {number} engines of {self._engine_threads} CPUs fit on the Ray cluster"]
        finally:
            engines.close()

    def _check_ranks(self) -> list[str]:
        ranks, cores = self._cluster.ranks, len(os.sched_getaffinity(0))
        if ranks == 1:
            return []
        each = f"cluster: {ranks} trainer ranks of {self._rank_threads} threads on this machine"
        slower = f", which has only {cores} cores: they take turns, which is slower than fewer ranks"
        return [each + (slower if ranks > cores else "")]

    def trainer(self, name: str, *, path: str, plan: TrainPlan) -> Trainer:
        if self._cluster.ranks == 1:
            return super().trainer(name, path=path, plan=plan)
        from sparring.cluster.rank_process import RankProcess
        from sparring.cluster.ranks import RankTrainer

        parts = replace(self._parts(name, path, plan), threads=self._rank_threads)
        count, timeout_s = self._cluster.ranks, self._cluster.timeout_s
        trainer = RankTrainer(
            parts, lambda: [RankProcess(rank, timeout_s) for rank in range(count)], self._cluster.start_timeout_s
        )
        self._trainers.append(trainer)
        return trainer

    @property
    def _rank_threads(self) -> int:
        return max(1, self._threads // self._cluster.ranks)

    @property
    def _engine_threads(self) -> int:
        return self._cluster.engine_threads or max(1, self._threads // self._cluster.engines)

    def _native(self, name: str, path: str) -> Engine:
        """Start the engine processes of the policy, or the engine of another model in this process."""
        if name != POLICY:
            return super()._native(name, path)
        key, spec = secrets.token_hex(16), self._models[name]
        threads = self._engine_threads
        words = [path, "--name", name, "--dtype", spec.dtype, "--numerics", spec.numerics, "--threads", str(threads)]
        words += [word for key_value in changed(self._engine_of[name]) for word in ("--set", key_value)]
        placed = self._start(words, key, threads)
        self._placed += placed
        deadline = time.monotonic() + self._cluster.start_timeout_s
        for process in placed:
            process.wait_until_ready(deadline)
        by_url = {process.url: process for process in placed}
        return self._fleet(name, path, [*by_url], key, lost=lambda engine: self._replace(by_url, engine))

    def _replace(self, by_url: dict[str, PlacedEngine], engine: RemoteEngine) -> None:
        """Have a lost engine started again, perhaps elsewhere, and let its client follow it. Returns at once."""
        process, loop = by_url[engine.url], asyncio.get_running_loop()
        process.kill()

        def follow() -> None:
            try:
                url = process.find(time.monotonic() + self._cluster.start_timeout_s)
            except EngineError as error:
                _log.warning("%s", error)
                return
            if url != engine.url:
                by_url[url] = process
                with suppress(RuntimeError):  # the run has ended
                    loop.call_soon_threadsafe(engine.move_to, url)

        threading.Thread(target=follow, daemon=True).start()

    def _start(self, words: Sequence[str], key: str, threads: int) -> Sequence[PlacedEngine]:
        if self._cluster.kind == "local":
            return [EngineProcess(words, key) for _ in range(self._cluster.engines)]
        from sparring.cluster.ray import RayEngines

        self._ray = RayEngines(self._cluster, threads)
        return self._ray.start(words, key)

    async def close(self) -> None:
        """Close every part, its threads and its processes. Safe to call twice."""
        await super().close()
        while self._placed:
            self._placed.pop().close()
        if self._ray is not None:
            self._ray.close()
            self._ray = None


def changed(config: EngineConfig) -> list[str]:
    """Return the settings of an `[engine]` section that are not the defaults, in the form of `--set`, for a server that
    has the section to itself."""
    default = EngineConfig()
    return [
        f"engine.{table}.{key}={json.dumps(value)}"
        for table in ("batch", "kv", "update")
        for key, value in msgspec.to_builtins(getattr(config, table)).items()
        if value != getattr(getattr(default, table), key)
    ]
