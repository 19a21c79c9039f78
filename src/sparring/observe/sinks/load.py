"""The sinks that a recipe asks for."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparring.errors import refusal
from sparring.observe.config import ObserveConfig
from sparring.observe.sinks.sink import Sink


def check_sinks(config: ObserveConfig) -> None:
    """Prove that every sink's library is there.

    Raises:
        BadInput: one is not.
    """
    if "wandb" in config.sinks and importlib.util.find_spec("wandb") is None:
        raise refusal(
            "observe.sinks", "the wandb package", "none installed", "pip install 'sparring[wandb]' or remove wandb"
        )


def load_sinks(config: ObserveConfig, folder: str | Path, *, name: str, recipe: Mapping[str, Any]) -> list[Sink]:
    """Open every sink of `[observe] sinks`.

    Args:
        config: which.
        folder: the run's.
        name: the run's.
        recipe: the resolved config as plain data, shown beside the run where a sink can.

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
