"""Weights of a stage that are evaluated and exported: its last, or those of its best checkpoint."""

from __future__ import annotations

from pathlib import Path

from sparring.stages.context import RunFiles
from sparring.stages.runtime.saved import BEST, LAST, train_of, weights_of
from sparring.train.config import TrainConfig


def chosen_weights(files: RunFiles, stage: str, weights: str) -> tuple[Path, str]:
    """Return the weights of a finished stage that are taken.

    Args:
        stage: whose output is the policy.
        weights: `best`; `last`; `auto`, which is `best` where the recipe names a `best_metric` for the stage.

    Returns:
        Their folder, and which of the two they are, in words; nothing where the stage has no best checkpoint.

    Raises:
        BadInput: the best checkpoint is not there.
        StoreError: it is damaged, or the disk is full.
    """
    best = (files.done(stage) or {}).get("best")
    if best is None:
        return files.output(stage), ""
    if weights == LAST or weights != BEST and not _is_named(files, stage):
        return files.output(stage), f"{stage}: the last weights; those of step {best['step']} are {stage}/{BEST}"
    value = f"{best['metric']} {best['value']:.4g}"
    return weights_of(files, stage, best["step"]), f"{stage}/{BEST}: the weights of step {best['step']}, {value}"


def _is_named(files: RunFiles, stage: str) -> bool:
    """Return whether the recipe names another metric than the default: the reward of a step's own tasks says little of
    which of its neighbours is better."""
    return train_of(files.config, stage).best_metric != TrainConfig().best_metric
