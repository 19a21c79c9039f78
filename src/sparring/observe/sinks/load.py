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
    """Refuse a sink whose library is not installed."""
    if "wandb" in config.sinks and importlib.util.find_spec("wandb") is None:
        raise refusal(
            "observe.sinks", "the wandb package", "none installed", "pip install 'sparring[wandb]' or remove wandb"
        )


def load_sinks(config: ObserveConfig, folder: str | Path, *, name: str, recipe: Mapping[str, Any]) -> list[Sink]:
    """Open every sink of `[observe] sinks`. Some show the `recipe`: resolved, as plain data."""
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
