"""Rows -> tensors of one micro-batch.

Shapes: N tokens, one for each distinct prefix of a row; B rows; M weighted tokens (those that some term trains).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sparring.batch.prefixes import lay_out
from sparring.types import Sample


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """Packed rows, without padding. The model's log-probability of targets[m] is read at row predicting[m] of its output.

    What rows begin with in common stands, and is computed, once: the rows are a walk through their tree of prefixes. Weighted
    tokens are per row, in the order of the rows given: several may be predicted from one place, and a token that several rows
    train is there for each of them.

    A row is cut before its last weighted token: what follows is predicted from there on but predicts nothing that is trained.
    A policy token whose advantage is exactly zero has no gradient and is not a weighted token.
    """

    tokens: torch.Tensor
    """[N] int64: ids, in the order of the walk."""
    positions: torch.Tensor
    """[N] int64: place in its row, from 0."""
    cu_seqlens: torch.Tensor
    """[B + 1] int32: row b of the walk adds tokens[cu_seqlens[b]:cu_seqlens[b + 1]]."""
    shared: torch.Tensor
    """[B] int32: behind the first shared[b] tokens of row b - 1 of the walk."""
    predicting: torch.Tensor
    """[M] int64: the place among the N whose output predicts the token, which is one before it."""
    targets: torch.Tensor
    """[M] int64: the weighted tokens' ids."""
    weights: Mapping[str, torch.Tensor]
    """Per term [M] float32; 0 where the term does not touch the token."""
    behaviour_logprobs: torch.Tensor
    """[M] float32: recorded when sampled; 0 where nothing was sampled."""
    advantages: torch.Tensor
    """[M] float32; 0 where there is none."""
    versions: torch.Tensor
    """[M] int64: the weight version that sampled the token; -1 where nothing was sampled."""
    kv_versions: torch.Tensor
    """[M] int64: the oldest version it attended to; -1 where nothing was sampled."""
    temperature: torch.Tensor
    """[M] float32."""
    annotations: Mapping[str, torch.Tensor]
    """Per annotation that every row carries, [M] float32."""
    denominators: Mapping[str, float]
    """Per term, over the whole update."""


def micro_batch(
    rows: Sequence[Sample], denominators: Mapping[str, float], device: torch.device | str = "cpu"
) -> MicroBatch:
    """Lay rows out as tensors on `device`, with the terms of `denominators`.

    Rows without a weighted token are left out; all may be (then N = B = M = 0).
    """
    terms = sorted(denominators)
    names = sorted(set.intersection(*(set(row.annotations) for row in rows))) if rows else []
    columns: dict[str, list[np.ndarray]] = {}
    sequences: list[np.ndarray] = []
    sources: list[np.ndarray] = []
    for row in rows:
        weights = _weights(row, terms)
        chosen = np.flatnonzero(weights.any(axis=0))
        if not len(chosen):
            continue
        tokens = np.array(row.tokens, dtype=np.int64)
        for name, values in _columns(row, tokens, names).items():
            columns.setdefault(name, []).append(values[chosen])
        columns.setdefault("weights", []).append(weights[:, chosen])
        sequences.append(tokens[: chosen[-1]])
        sources.append(chosen - 1)
    layout = lay_out(sequences)
    if columns:
        columns["predicting"] = [path[source] for path, source in zip(layout.paths, sources, strict=True)]

    def tensor(name: str, dtype: torch.dtype) -> torch.Tensor:
        values = np.concatenate(columns[name], axis=-1) if columns else np.zeros(0)
        return torch.as_tensor(values, dtype=dtype).to(device)

    weights = tensor("weights", torch.float32) if columns else torch.zeros(len(terms), 0, device=device)
    return MicroBatch(
        tokens=torch.from_numpy(layout.tokens).to(device),
        positions=torch.from_numpy(layout.positions).to(device),
        cu_seqlens=torch.from_numpy(layout.cu_seqlens).to(device),
        shared=torch.from_numpy(layout.shared).to(device),
        predicting=tensor("predicting", torch.int64),
        targets=tensor("targets", torch.int64),
        weights=dict(zip(terms, weights, strict=True)),
        behaviour_logprobs=tensor("logprobs", torch.float32),
        advantages=tensor("advantages", torch.float32),
        versions=tensor("versions", torch.int64),
        kv_versions=tensor("kv_versions", torch.int64),
        temperature=tensor("temperature", torch.float32),
        annotations={name: tensor(f"annotation {name}", torch.float32) for name in names},
        denominators=dict(denominators),
    )


def _weights(row: Sample, terms: Sequence[str]) -> np.ndarray:
    """[terms, T] float32."""
    weights = np.zeros((len(terms), len(row.tokens)), dtype=np.float32)
    for place, term in enumerate(terms):
        if term in row.weights:
            weights[place] = row.weights[term]
        if term == "policy" and row.advantages is not None:
            weights[place] *= np.array(row.advantages) != 0
    return weights


def _columns(row: Sample, tokens: np.ndarray, names: Sequence[str]) -> dict[str, np.ndarray]:
    """Everything per token of a row, each [T]."""
    length = len(tokens)
    columns = {
        "targets": tokens,
        "logprobs": _column(row.logprobs, 0.0, length),
        "advantages": _column(row.advantages, 0.0, length),
        "versions": _column(row.versions, -1, length),
        "kv_versions": _column(row.kv_versions, -1, length),
        "temperature": np.full(length, row.temperature),
    }
    return columns | {f"annotation {name}": np.array(row.annotations[name]) for name in names}


def _column(values: Sequence[float] | None, absent: float, length: int) -> np.ndarray:
    return np.full(length, absent) if values is None else np.array(values)
