"""The engine of a checkpoint, started in a process that has not imported torch yet."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from sparring.engine.config import EngineConfig
from sparring.launch.room import room
from sparring.model.config import DType, Numerics
from sparring.model.peft import base_of

if TYPE_CHECKING:
    from sparring.engine.native import NativeEngine

NUMBER_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
MARGIN = 1.1
"""What else a start writes, of the weights."""


def start_engine(
    folder: str | Path,
    *,
    dtype: DType,
    numerics: Numerics,
    engine: EngineConfig,
    threads: int = 0,
    name: str = "policy",
) -> NativeEngine:
    """Load a checkpoint and make its engine.

    Args:
        folder: the checkpoint, or an adapter beside one.
        dtype: of weights and computation.
        numerics: "exact" or "fast".
        engine: the rest of it.
        threads: of the engine; 0: as many as there are cores.
        name: what weight updates call the model.

    Raises:
        BadInput: the model is refused.
    """
    with room(weight_bytes(Path(base_of(folder)), dtype)):
        from sparring.engine.native import NativeEngine
        from sparring.model.load import equipped, module_of

        module = module_of(folder, dtype=dtype, numerics=numerics)  # imports its architecture, and maps its files

    model = equipped(module, folder, numerics)
    return NativeEngine(model, engine, name=name, threads=threads or len(os.sched_getaffinity(0)))


def weight_bytes(folder: Path, dtype: DType) -> int:
    """About what the weights of this checkpoint take in the engine's order; 0 where the folder does not say."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        written = config.get("dtype") or config.get("torch_dtype") or "float32"
        size = sum(file.stat().st_size for file in folder.glob("*.safetensors")) / NUMBER_BYTES[written]
    except (OSError, ValueError, KeyError, AttributeError):
        return 0
    return int(MARGIN * size * NUMBER_BYTES[dtype])
