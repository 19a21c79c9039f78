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
    folder: str | Path, *, dtype: DType, numerics: Numerics, engine: EngineConfig, threads: int = 0, name: str = "policy"
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
    where = base_of(folder)
    with room(weight_bytes(Path(where), dtype)):
        from sparring.engine.native import NativeEngine
        from sparring.model.library import architecture_of
        from sparring.model.load import load, read_config

        architecture_of(read_config(where, numerics))  # for its imports

    model = load(folder, dtype=dtype, numerics=numerics)
    return NativeEngine(model, engine, name=name, threads=threads or len(os.sched_getaffinity(0)))


def weight_bytes(folder: Path, dtype: DType) -> int:
    """About what loading this checkpoint takes of memory: its weights in the engine's order, and once more where the files,
    which are mapped, have another dtype. 0 where the folder does not say; then loading does."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        written = config.get("dtype") or config.get("torch_dtype") or "float32"
        size = sum(file.stat().st_size for file in folder.glob("*.safetensors")) / NUMBER_BYTES[written]
    except (OSError, ValueError, KeyError, AttributeError):
        return 0
    return int(MARGIN * size * NUMBER_BYTES[dtype] * (1 if written == dtype else 2))
