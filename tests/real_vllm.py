"""The real vLLM for tests: one server per model and process, from the environment that `make test-vllm` installs."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from sparring.engine.config import BatchConfig, EngineConfig, KvConfig, VllmConfig

if TYPE_CHECKING:
    from sparring.engine.adapters.vllm_server import VllmServer

PYTHON = os.environ.get("SPARRING_VLLM_PYTHON", str(Path(".venv-vllm/bin/python").absolute()))
"""Interpreter with vLLM: SPARRING_VLLM_PYTHON, or `.venv-vllm` in the working directory."""
CONFIG = EngineConfig(
    kind="vllm",
    batch=BatchConfig(max_running=16),
    kv=KvConfig(bytes=64 << 20),
    vllm=VllmConfig(python=PYTHON, arguments=("--enforce-eager",)),
)


@cache
def real_vllm(path: Path) -> VllmServer:
    """Return the server of a model, which ends with this process."""
    from sparring.engine.adapters.vllm_server import VllmServer

    return VllmServer(path, CONFIG, dtype="float32")
