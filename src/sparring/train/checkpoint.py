"""Checkpoint folders: written atomically, verified when read, limited in number."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from sparring.errors import StoreError, refusal
from sparring.train import one_by_one
from sparring.train.best import best_of
from sparring.train.held import Held, drain
from sparring.train.ranks import ALONE, Ranks, agree
from sparring.types import CheckpointRef
from sparring.weights.checksum import checksum

MODEL = "model.safetensors"
OPTIMISER = "optimiser.safetensors"
AVERAGE = "average-{}.safetensors"
"""File name of a moving average, by the average's name."""
SHARD = "optimiser-{}-of-{}.safetensors"
"""File name of a rank's shard of the optimiser, by the rank's number from 1 and the number of ranks."""
SHARDS, STEP = "shards", "step"
"""Key of a manifest for the stretches of each shard, by file; and the kind of tensors that are no stretches."""
MANIFEST = "trainer.json"
WAY_OUT = (
    "restore it from a copy, or pass it over, which removes nothing and trains the steps behind the one before it "
    "again: the same command with --set run.damaged=pass_over"
)


def write(
    path: Path,
    tensors: Mapping[str, Mapping[str, torch.Tensor]],
    manifest: Mapping[str, Any],
    ranks: Ranks = ALONE,
    weights: Held | None = None,
) -> None:
    """Write one checkpoint folder: every file of `tensors` and the weights, then the manifest with their checksums, and
    then one rename.

    All bytes are on disk before the rename, and until then `path` is unchanged. Each rank writes its own files; rank 0
    makes the folder, and writes the manifest and renames when all ranks are done.

    Args:
        tensors: named tensors by file name; no two ranks have a file in common.
        manifest: all other data, as JSON; that of rank 0 is written.
        weights: weights that rank 0 writes into `MODEL`, one tensor after the other.

    Raises:
        StoreError: the disk is full or cannot be written; the earlier contents of `path` are intact.
        OtherRankFailed: another rank could not write.
    """
    staging, first, complete = path.with_name(path.name + ".tmp"), ranks.rank == 0, False
    try:
        agree(ranks, lambda: _make(staging) if first else b"")
        written = agree(ranks, partial(_write_files, staging, tensors))
        if weights is not None:
            written += agree(ranks, partial(_write_weights, staging / MODEL, weights, writes=first))
        checksums = {name: value for data in written for name, value in json.loads(data or "{}").items()}
        agree(ranks, lambda: _commit(staging, path, {**manifest, "checksums": checksums}) if first else b"")
        complete = True
    except (OSError, SafetensorError) as cause:
        states = [*tensors.values(), *([] if weights is None else [weights.state()])]
        size = sum(t.numel() * t.element_size() for values in states for t in values.values())
        raise StoreError(
            f"checkpoint {path}: expected to write {size / 1e6:.1f} MB, got {cause}; "
            "free disk space and run the same command again: it resumes from the previous checkpoint, which is intact"
        ) from cause
    finally:
        if first and not complete:
            shutil.rmtree(staging, ignore_errors=True)


def _make(staging: Path) -> bytes:
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    return b""


def _write_files(staging: Path, tensors: Mapping[str, Mapping[str, torch.Tensor]]) -> bytes:
    """Write files of tensors; return their checksums as JSON."""
    for name, values in tensors.items():
        save_file({key: value.contiguous() for key, value in values.items()}, staging / name)
        _flush(staging / name)
    return json.dumps({name: checksum(values) for name, values in tensors.items()}).encode()


def _write_weights(path: Path, weights: Held, *, writes: bool) -> bytes:
    """Write the file of the weights, and return its checksum as JSON; or take part in the gathering of the tensors."""
    tensors = weights.tensors()
    try:
        if not writes:
            return b""
        written = one_by_one.write(path, weights.state(), tensors)
        _flush(path)
        return json.dumps({path.name: written}).encode()
    finally:
        drain(tensors)


def _commit(staging: Path, path: Path, manifest: Mapping[str, Any]) -> bytes:
    (staging / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    _flush(staging / MANIFEST)
    _flush(staging)
    _swap(staging, path)
    _flush(path.parent)
    return b""


def read(path: Path, device: torch.device | str = "cpu") -> tuple[dict[str, Any], dict[str, dict[str, torch.Tensor]]]:
    """Return the manifest and the tensors by file of a checkpoint folder, verified. Shards are joined: the tensors of
    `OPTIMISER` are whole, whatever the number of ranks that wrote them.

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
    if SHARDS in manifest:
        count = len(manifest[SHARDS])
        expected_files = {SHARD.format(number + 1, count) for number in range(count)}
        if not expected_files == manifest[SHARDS].keys() <= tensors.keys():
            got = ", ".join(sorted(manifest[SHARDS].keys() & tensors.keys()))
            raise StoreError(f"checkpoint {path}: expected all shards of the optimiser, got {got}; {WAY_OUT}")
        shards = {name: tensors.pop(name) for name in manifest[SHARDS]}
        tensors[OPTIMISER] = _joined(path, shards, manifest[SHARDS], tensors[MODEL])
    return manifest, tensors


def _joined(
    path: Path,
    shards: Mapping[str, Mapping[str, torch.Tensor]],
    stretches: Mapping[str, Mapping[str, Sequence[int]]],
    model: Mapping[str, torch.Tensor],
) -> dict[str, torch.Tensor]:
    """Join the optimiser's shards.

    Args:
        shards: tensors `<kind>/<parameter>` by file.
        stretches: begin and end of each parameter's elements, by file.
        model: the trained weights, which have the parameters' sizes.

    Raises:
        StoreError: the shards are not those of the whole model.
    """
    pieces: dict[str, list[tuple[int, torch.Tensor]]] = {}
    for file, tensors in shards.items():
        for key, tensor in tensors.items():
            name = key.partition("/")[2]
            pieces.setdefault(key, []).append((stretches[file][name][0], tensor))
    whole = {}
    for key, parts in pieces.items():
        kind, _, name = key.partition("/")
        if kind == STEP:
            whole[key] = parts[0][1]
            continue
        flat = torch.cat([tensor.reshape(-1) for _, tensor in sorted(parts, key=lambda part: part[0])])
        if name not in model or len(flat) != model[name].numel():
            got = f"{len(flat)} elements of {key}"
            raise StoreError(f"checkpoint {path}: expected the shards of the whole model, got {got}; {WAY_OUT}")
        whole[key] = flat
    return whole


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
