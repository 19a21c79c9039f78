"""Loader of a recipe's sinks."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparring.errors import refusal
from sparring.observe.config import ObserveConfig
from sparring.observe.sinks.sink import Sink


def check_sinks(config: ObserveConfig) -> None:
    """Check that every sink's library is installed.

    Raises:
        BadInput: a library is missing.
    """
    if "wandb" in config.sinks and importlib.util.find_spec("wandb") is None:
        raise refusal(
            "observe.sinks", "the wandb package", "none installed", "pip install 'sparring[wandb]' or remove wandb"
        )


def load_sinks(config: ObserveConfig, folder: str | Path, *, name: str, recipe: Mapping[str, Any]) -> list[Sink]:
    """Open every sink of `[observe] sinks`.

    Args:
        config: `[observe]`.
        folder: folder of the run.
        name: name of the run.
        recipe: resolved recipe as plain data, for sinks that show it.

    Raises:
        BadInput: a sink's library is not installed.
    """
    check_sinks(config)
    sinks: list[Sink] = []
    for kind in config.sinks:
        if kind == "jsonl":
            from sparring.observe.sinks.jsonl import JsonlSink

            sinks.append(JsonlSink(Path(folder) / "metrics.jsonl"))
        elif kind == "tensorboard":
            from sparring.observe.sinks.tensorboard import TensorboardSink

            sinks.append(TensorboardSink(Path(folder) / "tensorboard"))
        else:
            from sparring.observe.sinks.wandb import WandbSink

            sinks.append(WandbSink(folder, project=config.wandb_project, name=name, config=recipe))
    return sinks
