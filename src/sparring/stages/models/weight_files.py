"""Weights that a stage writes: a Hugging Face or adapter folder, whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sparring.model.peft import base_of, is_adapter, read_config, write
from sparring.protocols import Trainer


async def write_model(trainer: Trainer, source: Path, out: Path) -> None:
    """Write the weights of a trainer to `out`: a Hugging Face folder with config and tokenizer of `source`, or an
    adapter of the same base if `source` is an adapter."""
    ref = await trainer.push()
    write_weights(ref.location, source, out)


def write_weights(state: Any, source: Path, out: Path) -> None:
    """Write a published or saved state of a trainer that started from `source`."""
    from sparring.model.save import save

    if is_adapter(source):
        write_beside(out, lambda to: write(state, read_config(source), base_of(source), to))
    else:
        write_beside(out, lambda to: save(state, source, to))


def write_beside(out: Path, write_to: Callable[[Path], Any]) -> None:
    """Write a folder under a temporary name, then rename it to `out`."""
    staging = out.with_name(out.name + ".tmp")
    shutil.rmtree(staging, ignore_errors=True)
    write_to(staging)
    shutil.rmtree(out, ignore_errors=True)
    os.rename(staging, out)
