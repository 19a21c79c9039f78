"""A plain Hugging Face checkpoint folder that anybody's tools load."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sparring.model.hub import base_folder
from sparring.model.peft import base_of, is_adapter, read, read_config, write
from sparring.protocols import Store, Trainer
from sparring.recipe.run_config import RunConfig
from sparring.stages.context import Context
from sparring.stages.models.exported_format import write_format


async def run(context: Context) -> dict[str, Any]:
    """Copy the newest weights of the run to `<run>/export`, cast to `[export] dtype`, with a chat template that writes
    the run's prompts.

    Returns:
        `model`: the folder; `bytes`: its size.
    """
    context.sink.start("export", 1)
    source = context.input("export")
    out = context.folder / "export"
    for line in export_folder(source, out, context.config.export.dtype, (context.config, context.store)):
        context.sink.event("export", line)
    return {"model": str(out), "bytes": sum(file.stat().st_size for file in out.iterdir())}


def export_folder(source: Path, out: Path, dtype: str, run: tuple[RunConfig, Store] | None = None) -> list[str]:
    """Write `source` as a Hugging Face folder of `dtype` weights at `out`, whole or not at all; an adapter merged into
    its base.

    Args:
        source: a Hugging Face or adapter folder.
        out: the folder to write.
        dtype: of the weights.
        run: recipe and record of the run that `source` is of, whose chat format the folder gets; None: of none.

    Returns:
        What was found of the chat format, one sentence each.

    Raises:
        StoreError: the disk is full or cannot be written.
    """
    from sparring.model.load import load
    from sparring.model.lora import Adapter
    from sparring.model.save import save
    from sparring.model.targets import targets_of

    model = load(base_of(source), dtype=dtype, device="cpu", numerics="fast")
    state = model.state()
    if is_adapter(source):
        state = Adapter(read(source), model.dtype, model.device).merged(state, targets_of(model.module))
    findings: list[str] = []

    def written(to: Path) -> None:
        save(state, base_folder(source), to)
        if run is not None:
            findings.extend(write_format(to, base_folder(source), *run))

    _replace(out, written)
    return findings


async def write_model(trainer: Trainer, source: Path, out: Path) -> None:
    """Write what a trainer trains at `out`: as a Hugging Face folder with config and tokenizer from `source`, or, where
    `source` is an adapter, as an adapter of the same base."""
    ref = await trainer.push()
    write_weights(ref.location, source, out)


def write_weights(state: Any, source: Path, out: Path) -> None:
    """Write a state that a trainer which started from `source` has published or saved."""
    from sparring.model.save import save

    if is_adapter(source):
        _replace(out, lambda to: write(state, read_config(source), base_of(source), to))
    else:
        _replace(out, lambda to: save(state, source, to))


def _replace(out: Path, write_to: Callable[[Path], Any]) -> None:
    staging = out.with_name(out.name + ".tmp")
    shutil.rmtree(staging, ignore_errors=True)
    write_to(staging)
    shutil.rmtree(out, ignore_errors=True)
    os.rename(staging, out)
