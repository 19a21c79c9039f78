"""`cluster.kind = "local"` and `"ray"`: engines of the policy, and ranks of trainers, in separate processes."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from sparring.cluster.config import ClusterConfig
from sparring.cluster.engine_process import EngineProcess, serving
from sparring.cluster.inline import InlineCluster
from sparring.cluster.kept_engines import Ended, KeptEngines, PlacedEngine
from sparring.cluster.startup import starting
from sparring.engine.config import EngineConfig
from sparring.errors import refusal
from sparring.kernels.devices import gpu_count, gpu_of
from sparring.protocols import Engine, Trainer, TrainPlan, ValueModel
from sparring.types import POLICY

if TYPE_CHECKING:
    from sparring.cluster.ray import RayParts


RAY_LOG = "ray.log"
"""File in the run's folder for the output of Ray."""


class ProcessCluster:
    """Cluster whose engines of the policy are separate processes, as are the ranks of a trainer with several ranks. All
    other parts are in this process, in the cluster `here`. The run's `folder` has the log of Ray. Implements
    `protocols.Cluster`."""

    def __init__(self, cluster: ClusterConfig, folder: Path, here: InlineCluster) -> None:
        self._cluster, self._folder, self._here = cluster, folder, here
        self._rank_threads = cluster.rank_threads or max(1, here.threads // cluster.ranks)
        self._engine_threads = cluster.engine_threads or max(1, here.threads // cluster.engines)
        self._kept: list[KeptEngines] = []
        self._ended = Ended()
        self._ray: RayParts | None = None

    def check(self) -> list[str]:
        number, device = self._cluster.engines, self._here.device
        if self._cluster.kind == "local":
            have = f"CPU threads of each: {self._engine_threads}" if device == "cpu" else f"GPUs: {gpu_count()}"
            found = f"cluster: engine processes on this machine: {number}; {have}"
            return [found, *self._check_ranks(), *self._here.check()]
        if device != "cpu":
            raise refusal("run.device", '"cpu" with cluster.kind "ray"', device, "set it")
        self._connected()
        beside = f" and {self._cluster.ranks} ranks of {self._rank_threads}" if self._cluster.ranks > 1 else ""
        return [f"cluster: {number} engines of {self._engine_threads} CPUs{beside} fit on the Ray cluster"]

    def _check_ranks(self) -> list[str]:
        ranks, cores = self._cluster.ranks, len(os.sched_getaffinity(0))
        if ranks == 1:
            return []
        if self._here.device != "cpu":
            raise refusal("run.device", '"cpu" with several cluster.ranks', self._here.device, "set it, or ranks = 1")
        found = f"cluster: trainer ranks of each trained model: {ranks}; CPU threads of each: {self._rank_threads}"
        slower = f"; there are only {cores} cores: the ranks take turns, which is slower than fewer ranks"
        return [found + (slower if ranks > cores else "")]

    def trainer(self, name: str, *, path: str, plan: TrainPlan) -> Trainer:
        cluster, within_s, report = self._cluster, self._cluster.start_timeout_s, self._here.report
        if cluster.ranks == 1:
            return self._here.trainer(name, path=path, plan=plan)
        from sparring.cluster.rank_process import RankProcess
        from sparring.cluster.ranks import RankTrainer

        sharded = cluster.shard == "parameters"
        parts = replace(self._here.parts(name, path, plan), threads=self._rank_threads, sharded=sharded)
        if cluster.kind == "ray":
            ray, shared = self._connected(), self._folder.absolute()
            make = ray.ranks(self._rank_threads)
            trainer = RankTrainer(parts, make, cluster.ranks, within_s, shared, report, ray.nodes)
        else:
            start = partial(RankProcess, silent_s=cluster.timeout_s)
            trainer = RankTrainer(parts, lambda count: map(start, range(count)), cluster.ranks, within_s, report=report)
        return self._here.add_trainer(trainer)

    def engine(self, name: str, *, path: str) -> Engine:
        """Connect to the engine processes of the policy, or make another engine in this process."""
        spec, config = self._here.models[name], self._here.engine_of[name]
        if name != POLICY or spec.served is not None or config.kind not in ("native", "vllm"):
            return self._here.engine(name, path=path)
        native = config.kind == "native"  # then the fleet sends the model; each process of vLLM reads it
        words = ["--device", self._here.device] if native else [path, "--dtype", spec.dtype]
        kept = self._processes(words)
        kept.fleet = self._here.fleet(name, path, kept.find(), kept.key, kept)
        return self._here.add_engine(name, kept.fleet)

    def value_model(self, name: str, *, path: str) -> ValueModel:
        return self._here.value_model(name, path=path)

    def _processes(self, words: Sequence[str]) -> KeptEngines:
        """Return engine processes with the arguments `words` of `sparring serve`: the earlier stage's if their
        arguments are equal, else new ones, and the earlier processes are ended."""
        free = [kept for kept in self._kept if kept.free]
        for kept in free:
            if kept.words == words:
                return kept
        for kept in free:
            kept.close()
            self._kept.remove(kept)
        return self._start_processes(words)

    def _start_processes(self, words: Sequence[str]) -> KeptEngines:
        key, settings = secrets.token_hex(16), changed(self._here.engine_of[POLICY])
        command = [*words, "--name", POLICY, "--threads", str(self._engine_threads)]
        command += [word for key_value in settings for word in ("--set", key_value)]
        nodes = self._connected().nodes if self._cluster.kind == "ray" else 0
        within_s, report = self._cluster.start_timeout_s, self._here.report
        with starting("engine", self._cluster.engines, report, nodes) as ready:
            placed = self._start(command, key)
            kept = KeptEngines(placed, key=key, words=words, within_s=within_s, dead=self._ended, report=report)
            self._kept.append(kept)
            kept.find(ready)
        return kept

    def _start(self, words: Sequence[str], key: str) -> Sequence[PlacedEngine]:
        if self._cluster.kind == "local":
            return [EngineProcess(serving(words), key, gpu=self._gpu(nth)) for nth in range(self._cluster.engines)]
        return self._connected().start(words, key)

    def _connected(self) -> RayParts:
        from sparring.cluster.ray import RayParts

        if self._ray is None:
            log = self._folder / RAY_LOG if self._folder.is_dir() else None
            for_ranks = self._cluster.ranks * self._rank_threads if self._cluster.ranks > 1 else 0
            threads = 0 if self._here.engine_of[POLICY].elsewhere else self._engine_threads
            self._ray = RayParts(self._cluster, threads, for_ranks, log)
        return self._ray

    def _gpu(self, number: int) -> str:
        return "" if self._here.device == "cpu" else gpu_of(number, gpu_count())

    @asynccontextmanager
    async def stage(self, name: str) -> AsyncIterator[None]:
        async with self._here.stage(name), self._ended.within():
            yield

    async def close(self) -> None:
        """Close every trainer and engine, their threads and their processes. Safe to call twice."""
        await self._here.close()
        while self._kept:
            self._kept.pop().close()
        if self._ray is not None:
            self._ray.close()
            self._ray = None


def changed(config: EngineConfig) -> list[str]:
    """Return the settings of `[engine]` that a server needs and that differ from the defaults, in the form of `--set`:
    its `kind` and its tables."""
    default = EngineConfig()
    return ([] if config.kind == default.kind else [f"engine.kind={config.kind}"]) + [
        f"engine.{table}.{key}={json.dumps(value)}"
        for table in ("batch", "kv", "update", "vllm")
        for key, value in msgspec.to_builtins(getattr(config, table)).items()
        if value != getattr(getattr(default, table), key)
    ]
