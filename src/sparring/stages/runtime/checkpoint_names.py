"""Checkpoints of a stage by name: `<run>/<stage>/best`, `last` or `step-000146`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sparring.errors import refusal
from sparring.model.peft import is_adapter
from sparring.protocols import Store
from sparring.render.tokenizer import read_json
from sparring.stages.context import POLICY, RunFiles
from sparring.stages.models.adapters import START
from sparring.stages.models.policy import train_of
from sparring.stages.models.weight_files import write_weights
from sparring.train.best import best_of
from sparring.train.config import TrainConfig
from sparring.types import CheckpointRef

BEST, LAST = "best", "last"
CHECKPOINTS, WEIGHTS = "checkpoints", "weights"
"""Folders of a stage: checkpoints for a resume, and weights that were written from them on request."""
MANIFEST = "trainer.json"


def is_held_out(stage: str, metric: str) -> bool:
    """Return whether a metric is a figure of the evaluation during a stage, such as `rl/eval/success`."""
    return metric.startswith(f"{stage}/eval/")


def evaluated_steps(store: Store, stage: str) -> list[int]:
    """Return the steps of a stage with a recorded evaluation."""
    return [step for step, _ in store.metrics(f"{stage}/eval")]


def with_eval_metrics(store: Store, stage: str, refs: Sequence[CheckpointRef], metric: str) -> list[CheckpointRef]:
    """Return checkpoints with the value of `metric` from the stage's evaluations, if `metric` is one of their
    figures."""
    if not is_held_out(stage, metric):
        return list(refs)
    name = metric.removeprefix(f"{stage}/eval/")
    values = {step: figures[name] for step, figures in store.metrics(f"{stage}/eval") if name in figures}
    return [
        replace(ref, metrics={**ref.metrics, metric: values[ref.step]}) if ref.step in values else ref for ref in refs
    ]


def best_saved(refs: Sequence[CheckpointRef], train: TrainConfig) -> dict[str, Any] | None:
    """Return step, metric and value of the best checkpoint as plain data; None if no checkpoint has the metric."""
    best = best_of(refs, train.best_metric, train.best_is_highest)
    if best is None:
        return None
    return {"step": best.step, "metric": train.best_metric, "value": best.metrics[train.best_metric]}


def start_of(files: RunFiles, stage: str) -> Path:
    """Return a stage's input folder, or its first adapter if LoRA starts on a full model."""
    source = files.input(stage)
    adapted = files.config.models[POLICY].lora is not None and not is_adapter(source)
    return files.folder / START if adapted else source


def saved_step(files: RunFiles, stage: str, name: str) -> int:
    """Return the step of a named checkpoint.

    Args:
        name: `best`, `last` or `step-000146`.

    Raises:
        BadInput: the stage has no checkpoint of this name; the message lists the names.
    """
    folder = files.folder / stage
    refs = _refs(folder)
    by_name = {f"step-{ref.step:06d}": ref.step for ref in refs}
    if refs:
        by_name[LAST] = refs[-1].step
        train = train_of(files.config, stage)
        best = best_saved(with_eval_metrics(files.store, stage, refs, train.best_metric), train)
        by_name |= {} if best is None else {BEST: best["step"]}
    if name not in by_name:
        expected = f"a checkpoint of the stage: {', '.join(by_name) or 'none is there'}"
        fix = "name one of these; train.best_metric says which is the best" if by_name else "run the stage first"
        raise refusal(str(folder / name), expected, name, fix)
    return by_name[name]


def weights_of(files: RunFiles, stage: str, step: int) -> Path:
    """Return a Hugging Face or adapter folder with the weights of a checkpoint: `<run>/<stage>/weights/step-N`. It is
    written on the first call and deleted with the checkpoint.

    Raises:
        BadInput: the checkpoint or the stage's input is missing.
        StoreError: the checkpoint is damaged, or the disk is full.
    """
    from sparring.train.checkpoint import MODEL, read

    saved = _checkpoint_folder(files.folder / stage, step)
    out = files.folder / stage / WEIGHTS / saved.name
    manifest = (saved / MANIFEST).read_bytes() if (saved / MANIFEST).is_file() else b""
    if (out / MANIFEST).is_file() and (out / MANIFEST).read_bytes() == manifest:
        return out
    _, tensors = read(saved)
    try:
        out.parent.mkdir(exist_ok=True)
        staging = out.with_name(out.name + ".new")
        write_weights(tensors[MODEL], start_of(files, stage), staging)
        (staging / MANIFEST).write_bytes(manifest)
        shutil.rmtree(out, ignore_errors=True)
        os.rename(staging, out)
    except OSError as error:
        raise refusal(str(out), "a folder that can be written", str(error), "make room, or copy the run") from error
    return out


def _refs(folder: Path) -> list[CheckpointRef]:
    """Return the complete checkpoints in a stage's folder, oldest first. Each path is below `folder`, even if the run
    was moved."""
    refs = []
    for saved in sorted((folder / CHECKPOINTS).glob("step-*")):
        if saved.name.removeprefix("step-").isdigit() and (saved / MANIFEST).is_file():
            manifest = read_json(saved / MANIFEST)
            metrics = {name: value for name, value in manifest["metrics"].items() if value is not None}
            named = {"model": manifest["model"], "stage": manifest["stage"], "step": manifest["step"]}
            refs.append(CheckpointRef(**named, path=str(saved), metrics=metrics))
    return refs


def _checkpoint_folder(folder: Path, step: int) -> Path:
    return folder / CHECKPOINTS / f"step-{step:06d}"
