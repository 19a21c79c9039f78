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

from sparring.errors import StoreError
from sparring.train import tensor_files
from sparring.train.best import best_of
from sparring.train.optimiser_state import StoredOptimiser
from sparring.train.ranks import ALONE, Ranks, agree
from sparring.train.trained_weights import TrainedWeights, drain
from sparring.types import CheckpointRef
from sparring.weights.checksum import checksum

MODEL = "model.safetensors"
OPTIMISER = "optimiser.safetensors"
AVERAGE = "average-{}.safetensors"
"""File name of a moving average, by the average's name."""
SHARD = "optimiser-{}-of-{}.safetensors"
"""File name of a rank's shard of the optimiser, by the rank's number from 1 and the number of ranks."""
SHARDS = "shards"
"""Key of a manifest for the ranges of parameters' elements in each shard, by file."""
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
    weights: TrainedWeights | None = None,
) -> None:
    """Write one checkpoint folder under a temporary name: every file of `tensors`, the weights, then the manifest with
    all checksums. Then rename the folder to `path`.

    All bytes are on disk before the rename, and until then `path` is unchanged. Each rank writes its own files. Rank 0
    makes the folder; when all ranks are done, it writes the manifest and renames the folder.

    Args:
        tensors: named tensors by file name; no two ranks have a file in common.
        manifest: all other data, as JSON; only rank 0's manifest is written.
        weights: weights that rank 0 writes into `MODEL`, one tensor after the other.

    Raises:
        StoreError: the disk is full or cannot be written; the earlier contents of `path` are intact.
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


def _write_weights(path: Path, weights: TrainedWeights, *, writes: bool) -> bytes:
    """Write the file of the weights and return its checksum as JSON. If `writes` is False, only take part in gathering
    the tensors."""
    tensors = weights.tensors()
    try:
        if not writes:
            return b""
        written = tensor_files.write(path, weights.state(), tensors)
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


def read(
    path: Path, device: torch.device | str = "cpu", ranks: Ranks = ALONE
) -> tuple[dict[str, Any], dict[str, dict[str, torch.Tensor]]]:
    """Return the manifest of a checkpoint folder, and its tensors by file. Raises StoreError for damaged or missing
    files. The optimiser's files are only verified here, each by one rank; `stored_optimiser` reads them."""
    manifest: dict[str, Any] = {}
    tensors: dict[str, dict[str, torch.Tensor]] = {}

    def own() -> bytes:
        folder = _present(path)
        try:
            manifest.update(json.loads((folder / MANIFEST).read_text()))
            _check_shards(path, manifest)
            of_optimiser = [name for name in manifest["checksums"] if name in (*manifest.get(SHARDS, ()), OPTIMISER)]
            for name in of_optimiser[ranks.rank :: ranks.count]:
                _check(path, name, load_file(folder / name), manifest)
            for name in manifest["checksums"].keys() - set(of_optimiser) | {MODEL}:
                tensors[name] = load_file(folder / name, device=str(device))
                _check(path, name, tensors[name], manifest)
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as cause:
            raise StoreError(f"checkpoint {path}: cannot be read ({cause}); {WAY_OUT}") from cause
        return b""

    agree(ranks, own)  # so that all ranks restore it, or none
    return manifest, tensors


def stored_optimiser(path: Path, manifest: Mapping[str, Any], model: Mapping[str, torch.Tensor]) -> StoredOptimiser:
    """Open the optimiser's state of a checkpoint that `read` has verified. Raises StoreError if the state is damaged.
    `model` has the trained weights by name, for the sizes of the parameters."""
    folder, files = _present(path), manifest.get(SHARDS) or {OPTIMISER: None}
    sizes = {name: tensor.numel() for name, tensor in model.items()}
    try:
        return StoredOptimiser(path, {folder / name: stretches for name, stretches in files.items()}, sizes)
    except StoreError as cause:
        raise StoreError(f"{cause}; {WAY_OUT}") from None
    except (OSError, KeyError, SafetensorError) as cause:
        raise StoreError(f"checkpoint {path}: cannot be read ({cause}); {WAY_OUT}") from cause


def _present(path: Path) -> Path:
    """Return the folder of a checkpoint; refuse a folder without a manifest. The folder has another name after a crash
    between the two renames of `_swap`."""
    replaced = path.with_name(path.name + ".old")
    folder = replaced if not path.exists() and replaced.exists() else path
    if not (folder / MANIFEST).is_file():
        raise StoreError(f"checkpoint {folder}: expected a folder with {MANIFEST}, got none; {WAY_OUT}")
    return folder


def _check(path: Path, name: str, tensors: Mapping[str, torch.Tensor], manifest: Mapping[str, Any]) -> None:
    """Refuse a file whose tensors do not have the checksum in the manifest."""
    expected = manifest["checksums"][name]
    if (actual := checksum(tensors)) != expected:
        raise StoreError(f"checkpoint {path}: expected checksum {expected} of {name}, got {actual}; {WAY_OUT}")


def _check_shards(path: Path, manifest: Mapping[str, Any]) -> None:
    """Refuse a manifest whose n shards are not 1-of-n to n-of-n, or that has no checksum of one of them."""
    if SHARDS in manifest:
        count = len(manifest[SHARDS])
        expected = {SHARD.format(number + 1, count) for number in range(count)}
        if not expected == manifest[SHARDS].keys() <= manifest["checksums"].keys():
            found = ", ".join(sorted(manifest[SHARDS].keys() & manifest["checksums"].keys()))
            raise StoreError(f"checkpoint {path}: expected all shards of the optimiser, got {found}; {WAY_OUT}")


def retain(
    refs: Sequence[CheckpointRef],
    *,
    keep_last: int,
    best_metric: str = "",
    best_is_highest: bool = True,
    also: Collection[int] = (),
) -> list[CheckpointRef]:
    """Delete all checkpoint folders except the last `keep_last`, the best checkpoint and the checkpoints at the steps
    in `also`. Return the remaining checkpoints, oldest first.

    Call it only when the manifest of the newest checkpoint is in the store.

    Args:
        refs: checkpoints of one stage, oldest first.
        best_metric: key of `CheckpointRef.metrics` that decides which is best; empty: no checkpoint counts as best.
    """
    best = best_of(refs, best_metric, best_is_highest)
    latest = {ref.step for ref in refs[-keep_last:]}
    retained = [ref for ref in refs if ref.step in latest or ref is best or ref.step in also]
    for path in {ref.path for ref in refs} - {ref.path for ref in retained}:
        shutil.rmtree(path, ignore_errors=True)
    return retained


def _swap(staging: Path, path: Path) -> None:
    """Move `staging` to `path`. An existing folder at `path` is renamed first, because no folder can be renamed over
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
