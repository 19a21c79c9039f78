"""Choice of a stage's weights for evaluation and export: the last, or the best checkpoint."""

from __future__ import annotations

from pathlib import Path

from sparring.stages.context import RunFiles
from sparring.stages.models.policy import train_of
from sparring.stages.runtime.checkpoint_names import BEST, LAST, weights_of
from sparring.train.config import TrainConfig


def chosen_weights(files: RunFiles, stage: str, weights: str) -> tuple[Path, str]:
    """Return the folder of a finished stage's chosen weights, and a sentence about the choice if the stage has a best
    checkpoint.

    Args:
        weights: `best`; `last`; or `auto`, which is `best` if the recipe sets `best_metric` for the stage.
    """
    best = (files.done(stage) or {}).get("best")
    if best is None:
        return files.output(stage), ""
    if weights == LAST or weights != BEST and not _is_named(files, stage):
        return files.output(stage), f"{stage}: the last weights; those of step {best['step']} are {stage}/{BEST}"
    value = f"{best['metric']} {best['value']:.4g}"
    return weights_of(files, stage, best["step"]), f"{stage}/{BEST}: the weights of step {best['step']}, {value}"


def _is_named(files: RunFiles, stage: str) -> bool:
    """Return whether the recipe sets `best_metric`. The default, the reward of a step's own tasks, cannot compare
    checkpoints, because their tasks differ."""
    return train_of(files.config, stage).best_metric != TrainConfig().best_metric
