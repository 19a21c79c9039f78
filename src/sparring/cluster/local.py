"""`cluster.kind = "local"`: engines of the policy in processes of their own on this machine."""

from __future__ import annotations

import json
import secrets
import time
from typing import Any

import msgspec

from sparring.cluster.config import ClusterConfig
from sparring.cluster.engine_process import EngineProcess
from sparring.cluster.inline import InlineCluster
from sparring.engine.config import EngineConfig
from sparring.protocols import Engine
from sparring.types import POLICY


class LocalCluster(InlineCluster):
    """Cluster whose engines of the policy are processes; all else is in this process. Implements `protocols.Cluster`.

    Args:
        cluster: section `[cluster]`.
        settings: arguments of `InlineCluster`.
    """

    def __init__(self, cluster: ClusterConfig, **settings: Any) -> None:
        super().__init__(**settings)
        self._cluster = cluster
        self._processes: list[EngineProcess] = []

    def _native(self, name: str, path: str) -> Engine:
        """Start the engine processes of the policy, or the engine of another model in this process."""
        if name != POLICY:
            return super()._native(name, path)
        key, number, spec = secrets.token_hex(16), self._cluster.engines, self._models[name]
        threads = self._cluster.engine_threads or max(1, self._threads // number)
        words = [path, "--name", name, "--dtype", spec.dtype, "--numerics", spec.numerics, "--threads", str(threads)]
        words += [word for key_value in changed(self._engine_of[name]) for word in ("--set", key_value)]
        processes = [EngineProcess(words, key) for _ in range(number)]
        self._processes += processes
        deadline = time.monotonic() + self._cluster.start_timeout_s
        for process in processes:
            process.wait_until_ready(deadline)
        by_url = {process.url: process for process in processes}
        return self._fleet(name, path, [*by_url], key, lost=lambda url: by_url[url].kill())

    async def close(self) -> None:
        """Close every part, its threads and its processes. Safe to call twice."""
        await super().close()
        while self._processes:
            self._processes.pop().close()


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
