"""The real vLLM, for tests: one server per model for the whole process, from the environment that `make test-vllm`
installs."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from sparring.engine.config import EngineConfig, VllmConfig

if TYPE_CHECKING:
    from sparring.engine.adapters.vllm_server import VllmServer

PYTHON = os.environ.get("SPARRING_VLLM_PYTHON", str(Path(".venv-vllm/bin/python").absolute()))
"""The interpreter that has vLLM; `.venv-vllm` of the working directory unless the environment says otherwise."""
CONFIG = EngineConfig(
    kind="vllm", max_running=16, kv_bytes=64 << 20, vllm=VllmConfig(python=PYTHON, arguments=("--enforce-eager",))
)


@cache
def real_vllm(path: Path) -> VllmServer:
    """Return the server of a model. It ends with this process, whatever becomes of it."""
    from sparring.engine.adapters.vllm_server import VllmServer

    return VllmServer(path, CONFIG, dtype="float32")
