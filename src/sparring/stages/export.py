"""A plain Hugging Face checkpoint folder that anybody's tools load."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from sparring.protocols import Trainer
from sparring.stages.context import Context


async def run(context: Context) -> dict[str, Any]:
    """Copy the newest weights of the run to `<run>/export`, cast to `[export] dtype`.

    Returns:
        `model`: the folder; `bytes`: its size.
    """
    context.sink.start("export", 1)
    source = context.input("export")
    out = context.folder / "export"
    export_folder(source, out, context.config.export.dtype)
    return {"model": str(out), "bytes": sum(file.stat().st_size for file in out.iterdir())}


def export_folder(source: Path, out: Path, dtype: str) -> None:
    """Write `source` as a Hugging Face folder of `dtype` weights at `out`, whole or not at all.

    Raises:
        StoreError: the disk is full or cannot be written.
    """
    from sparring.model.load import load

    model = load(str(source), dtype=dtype, device="cpu", numerics="fast")
    _replace(model.state(), source, out)


async def write_model(trainer: Trainer, source: Path, out: Path) -> None:
    """Write a trainer's weights as a Hugging Face folder at `out`; config and tokenizer come from `source`."""
    ref = await trainer.push()
    _replace(ref.location, source, out)


def _replace(state: Any, source: Path, out: Path) -> None:
    from sparring.model.save import save

    staging = out.with_name(out.name + ".tmp")
    shutil.rmtree(staging, ignore_errors=True)
    save(state, str(source), str(staging))
    shutil.rmtree(out, ignore_errors=True)
    os.rename(staging, out)
