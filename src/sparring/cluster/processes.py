"""`cluster.kind = "local"` and `"ray"`: engines of the policy in processes of their own."""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from sparring.cluster.config import ClusterConfig
from sparring.cluster.engine_process import EngineProcess, serving
from sparring.cluster.inline import InlineCluster
from sparring.cluster.kept_engines import Ended, KeptEngines, PlacedEngine
from sparring.engine.config import EngineConfig
from sparring.errors import refusal
from sparring.kernels.devices import gpu_count, gpu_of
from sparring.model.hub import base_folder
from sparring.protocols import Engine
from sparring.types import POLICY
from sparring.weights import files

if TYPE_CHECKING:
    from sparring.cluster.ray import RayEngines


class ProcessCluster(InlineCluster):
    """Cluster whose engines of the policy are processes; all else is in this process. Implements `protocols.Cluster`.

    Args:
        cluster: section `[cluster]`.
        settings: arguments of `InlineCluster`.
    """

    def __init__(self, cluster: ClusterConfig, **settings: Any) -> None:
        super().__init__(**settings)
        self._cluster = cluster
        self._kept: list[KeptEngines] = []
        self._ended = Ended()
        self._ray: RayEngines | None = None

    def check(self) -> list[str]:
        number = self._cluster.engines
        if self._cluster.kind == "local":
            of = f"{self._engine_threads} threads" if self._device == "cpu" else f"a GPU ({gpu_count()} here)"
            return [f"cluster: {number} engine processes of {of} on this machine"]
        if self._device != "cpu":
            raise refusal("run.device", '"cpu" with cluster.kind "ray"', self._device, "set it")
        from sparring.cluster.ray import RayEngines

        engines = RayEngines(self._cluster, self._engine_threads)
        try:
            return [f"cluster: {number} engines of {self._engine_threads} CPUs fit on the Ray cluster"]
        finally:
            engines.close()

    @property
    def _engine_threads(self) -> int:
        return self._cluster.engine_threads or max(1, self._threads // self._cluster.engines)

    def _native(self, name: str, path: str) -> Engine:
        """Connect to the engine processes of the policy, or make the engine of another model in this process."""
        if name != POLICY:
            return super()._native(name, path)
        return self._fleet_of(name, path, ["--numerics", self._models[name].numerics, "--device", self._device])

    def _vllm(self, name: str, path: str) -> Engine:
        """Connect to the engine processes of the policy, each of which starts a vLLM."""
        return self._fleet_of(name, path, [])

    def _fleet_of(self, name: str, path: str, words: Sequence[str]) -> Engine:
        """Connect to engine processes.

        Args:
            words: further arguments of `sparring serve`.
        """
        kept = self._kept_for(name, path, words)
        kept.fleet = self._fleet(name, path, kept.find(), kept.key, kept)
        return kept.fleet

    def _kept_for(self, name: str, path: str, words: Sequence[str]) -> KeptEngines:
        """Return engine processes of an earlier stage that no fleet uses, or start some. Those that serve a model of
        another shape make room."""
        shape, free = files.digest(files.read(base_folder(path))), [kept for kept in self._kept if kept.free]
        for kept in free:
            if kept.shape == shape:
                return kept
            kept.close()
            self._kept.remove(kept)
        key, spec, threads = secrets.token_hex(16), self._models[name], self._engine_threads
        words = [path, "--name", name, "--dtype", spec.dtype, "--threads", str(threads), *words]
        words += [word for key_value in changed(self._engine_of[name]) for word in ("--set", key_value)]
        placed = self._start(words, key, threads)
        within_s = self._cluster.start_timeout_s
        self._kept.append(KeptEngines(placed, key=key, shape=shape, within_s=within_s, dead=self._ended))
        return self._kept[-1]

    def _start(self, words: Sequence[str], key: str, threads: int) -> Sequence[PlacedEngine]:
        if self._cluster.kind == "local":
            return [EngineProcess(serving(words), key, gpu=self._gpu(nth)) for nth in range(self._cluster.engines)]
        from sparring.cluster.ray import RayEngines

        self._ray = self._ray or RayEngines(self._cluster, threads)
        return self._ray.start(words, key)

    def _gpu(self, number: int) -> str:
        return "" if self._device == "cpu" else gpu_of(number, gpu_count())

    @asynccontextmanager
    async def stage(self) -> AsyncIterator[None]:
        async with super().stage(), self._ended.within():
            yield

    async def close(self) -> None:
        """Close every part, its threads and its processes. Safe to call twice."""
        await super().close()
        while self._kept:
            self._kept.pop().close()
        if self._ray is not None:
            self._ray.close()
            self._ray = None


def changed(config: EngineConfig) -> list[str]:
    """Return the settings of an `[engine]` section that are not the defaults, in the form of `--set`, for a server that
    has the section to itself."""
    default = EngineConfig()
    return ([] if config.kind == default.kind else [f"engine.kind={config.kind}"]) + [
        f"engine.{table}.{key}={json.dumps(value)}"
        for table in ("batch", "kv", "update", "vllm")
        for key, value in msgspec.to_builtins(getattr(config, table)).items()
        if value != getattr(getattr(default, table), key)
    ]
