"""Checkpoint folders: written atomically, verified when read, limited in number."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from sparring.errors import StoreError, refusal
from sparring.train.best import best_of
from sparring.types import CheckpointRef
from sparring.weights.checksum import checksum

MODEL = "model.safetensors"
OPTIMISER = "optimiser.safetensors"
AVERAGE = "average-{}.safetensors"
"""File name of a moving average, by the average's name."""
MANIFEST = "trainer.json"
WAY_OUT = (
    "restore it from a copy, or pass it over, which removes nothing and trains the steps behind the one before it "
    "again: the same command with --set run.damaged=pass_over"
)


def write(path: Path, tensors: Mapping[str, Mapping[str, torch.Tensor]], manifest: Mapping[str, Any]) -> None:
    """Write one checkpoint folder: every file of `tensors`, then the manifest with their checksums, then one rename.

    All bytes are on disk before the rename, and until then `path` is unchanged.

    Args:
        tensors: named tensors by file name.
        manifest: all other data, as JSON.

    Raises:
        StoreError: the disk is full or cannot be written; the earlier contents of `path` are intact.
    """
    staging = path.with_name(path.name + ".tmp")
    try:
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        for name, values in tensors.items():
            save_file({key: value.contiguous() for key, value in values.items()}, staging / name)
            _flush(staging / name)
        checksums = {name: checksum(values) for name, values in tensors.items()}
        (staging / MANIFEST).write_text(json.dumps({**manifest, "checksums": checksums}, indent=2) + "\n")
        _flush(staging / MANIFEST)
        _flush(staging)
        _swap(staging, path)
        _flush(path.parent)
    except (OSError, SafetensorError) as cause:
        shutil.rmtree(staging, ignore_errors=True)
        size = sum(t.numel() * t.element_size() for values in tensors.values() for t in values.values())
        raise StoreError(
            f"checkpoint {path}: expected to write {size / 1e6:.1f} MB, got {cause}; "
            "free disk space and run the same command again: it resumes from the previous checkpoint, which is intact"
        ) from cause


def read(path: Path, device: torch.device | str = "cpu") -> tuple[dict[str, Any], dict[str, dict[str, torch.Tensor]]]:
    """Return the manifest and the tensors by file of a checkpoint folder, verified.

    Raises:
        BadInput: `path` holds no checkpoint.
        StoreError: the checkpoint is damaged.
    """
    replaced = path.with_name(path.name + ".old")
    if not path.exists() and replaced.exists():  # a crash between the two renames of `_swap`
        path = replaced
    if not (path / MANIFEST).is_file():
        raise refusal(
            f"checkpoint {path}", f"a folder with {MANIFEST}", "none", "name a checkpoint that this run wrote"
        )
    tensors: dict[str, dict[str, torch.Tensor]] = {}
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        for name in manifest["checksums"]:
            tensors[name] = load_file(path / name, device=str(device))
    except (OSError, ValueError, KeyError, SafetensorError) as cause:
        raise StoreError(f"checkpoint {path}: cannot be read ({cause}); {WAY_OUT}") from cause
    for name, expected in manifest["checksums"].items():
        if (actual := checksum(tensors[name])) != expected:
            raise StoreError(f"checkpoint {path}: expected checksum {expected} of {name}, got {actual}; {WAY_OUT}")
    return manifest, tensors


def retain(
    refs: Sequence[CheckpointRef],
    *,
    keep_last: int,
    best_metric: str = "",
    best_is_highest: bool = True,
    also: Collection[int] = (),
) -> list[CheckpointRef]:
    """Delete all checkpoint folders except the last `keep_last`, the best one and the steps of `also`.

    Call it only when the manifest of the newest checkpoint is in the store.

    Args:
        refs: checkpoints of one stage, oldest first.
        best_metric: key of `CheckpointRef.metrics`; empty keeps no best.
        also: steps of further checkpoints to keep.

    Returns:
        The remaining checkpoints, oldest first.
    """
    best = best_of(refs, best_metric, best_is_highest)
    latest = {ref.step for ref in refs[-keep_last:]}
    retained = [ref for ref in refs if ref.step in latest or ref is best or ref.step in also]
    for path in {ref.path for ref in refs} - {ref.path for ref in retained}:
        shutil.rmtree(path, ignore_errors=True)
    return retained


def _swap(staging: Path, path: Path) -> None:
    """Move `staging` to `path`. An existing folder is renamed first, because a folder cannot be renamed over
    another."""
    replaced = path.with_name(path.name + ".old")
    shutil.rmtree(replaced, ignore_errors=True)
    if path.exists():
        os.rename(path, replaced)
    os.rename(staging, path)
    shutil.rmtree(replaced, ignore_errors=True)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
