"""Rows -> tensors of one micro-batch.

Shapes: N tokens, one per distinct prefix of a row; R rows given; B rows of the walk; M weighted tokens, which some term
trains; K kept ids in total, or a teacher's likeliest ids per token; A biased logits in total.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sparring.annotations import Annotation
from sparring.batch.annotations import agreed
from sparring.batch.prefixes import PrefixLayout, lay_out
from sparring.types import Sample


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """Packed rows without padding. The log-probability of targets[m] is read from the model's output at position
    predicting[m].

    Shared prefixes are stored and computed once: the rows are a walk through their prefix tree. Weighted tokens are per
    row, in the order of the rows given: one position can predict several weighted tokens, and a token that several rows
    train occurs once for each.

    A row is cut before its last weighted token, since that token and later ones predict nothing that is trained. A
    policy token with an advantage of exactly 0 has no gradient and is not a weighted token.
    """

    tokens: torch.Tensor
    """[N] int64 ids, in the order of the walk."""
    positions: torch.Tensor
    """[N] int64 position in the row, from 0."""
    cu_seqlens: torch.Tensor
    """[B + 1] int32 offsets: row b of the walk adds tokens[cu_seqlens[b]:cu_seqlens[b + 1]]."""
    shared: torch.Tensor
    """[B] int32 number of tokens that row b of the walk shares with row b - 1."""
    predicting: torch.Tensor
    """[M] int64 index, among the N tokens, of the token before the weighted token; the output there predicts the
    weighted token."""
    targets: torch.Tensor
    """[M] int64 ids of the weighted tokens."""
    rows: torch.Tensor
    """[M] int64 index of the token's row among the R rows given."""
    turns: torch.Tensor
    """[M] int64 number of the token's turn, from 0 over all rows: an unbroken run of policy tokens, or of weighted
    tokens if there is no policy term. Tokens between turns have the number of the turn before."""
    weights: Mapping[str, torch.Tensor]
    """Weight per term, [M] float32; 0 at tokens that the term does not train."""
    behaviour_logprobs: torch.Tensor
    """[M] float32 log-probability recorded by the engine; 0 at tokens that were not sampled."""
    advantages: torch.Tensor
    """[M] float32 advantage; 0 at tokens without one."""
    versions: torch.Tensor
    """[M] int64 weight version that sampled the token; -1 if it was not sampled."""
    kv_versions: torch.Tensor
    """[M] int64 oldest weight version of the keys and values that the token attended to; -1 if it was not sampled."""
    temperature: torch.Tensor
    """[M] float32 sampling temperature of the row; 1 for tokens with weight only in the imitate term, which trains the
    distribution at temperature 1."""
    kept: tuple[torch.Tensor, torch.Tensor] | None
    """Kept sets: offsets [M + 1] int64 and ids [K] int32. Token m was drawn from ids[offsets[m]:offsets[m + 1]],
    ascending; an empty set is the whole vocabulary. None if all sets are empty."""
    bias: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None
    """Logit biases: offsets [M + 1] int64, ids [A] int64 and values [A] float32, which were added to the logits before
    token m was drawn. None without any bias."""
    tops: tuple[torch.Tensor, torch.Tensor] | None
    """A teacher's likeliest tokens: ids [M, K] int64 and log-probabilities [M, K] float32, padded with -1 and minus
    infinity. None without a teacher's scores."""
    teachers: Mapping[str, torch.Tensor]
    """Mask per teacher that a row names, [M] bool: True for tokens of its rows."""
    annotations: Mapping[Annotation, torch.Tensor]
    """Annotations by name, [M] float32; all rows carry the same ones."""
    denominators: Mapping[str, float]
    """Denominator per term, over the whole update."""
    group: torch.Tensor
    """[R] int64 number of the row's group, from 0."""
    trajectory: torch.Tensor
    """[R] int64 number of the row's trajectory, from 0."""
    label: torch.Tensor
    """[R] float32 `Sample.label`; 0 for rows without one."""


def micro_batch(
    rows: Sequence[Sample],
    denominators: Mapping[str, float],
    device: torch.device | str = "cpu",
    *,
    idle_tokens: bool = False,
) -> MicroBatch:
    """Lay rows out as tensors on `device`, with the terms of `denominators`. Rows without a weighted token are left
    out; without any row left, N = B = M = 0. `idle_tokens` keeps policy tokens with an advantage of 0."""
    terms = sorted(denominators)
    names = agreed(rows)
    flat = _Flat(rows)
    weights = _weights(flat, terms)
    marked = np.asarray(weights.any(axis=0))
    # another term may weigh tokens between two turns
    turns = _turns(flat, weights[terms.index("policy")] != 0 if "policy" in terms else marked)
    temperature = _temperature(flat, terms, weights)
    if not idle_tokens:
        weights = _mask_idle(flat, terms, weights)
        marked = np.asarray(weights.any(axis=0))
    chosen = np.flatnonzero(marked)
    layout, predicting = _layout_and_predictors(flat, chosen)

    def integers(values: np.ndarray) -> torch.Tensor:
        return torch.as_tensor(values, dtype=torch.int64).to(device)

    def column(values: Iterable[Sequence[float] | None], absent: float = 0, kind: type = np.float32) -> torch.Tensor:
        return torch.from_numpy(flat.column(values, absent, kind)[chosen]).to(device)

    return MicroBatch(
        tokens=integers(layout.tokens),
        positions=integers(layout.positions),
        cu_seqlens=torch.from_numpy(layout.cu_seqlens).to(device),
        shared=torch.from_numpy(layout.shared).to(device),
        predicting=integers(predicting),
        targets=integers(flat.tokens[chosen]),
        rows=integers(flat.of_each(range(len(rows)), np.int64)[chosen]),
        turns=integers(turns[chosen]),
        weights={t: torch.from_numpy(w[chosen]).to(device) for t, w in zip(terms, weights, strict=True)},
        behaviour_logprobs=column(row.logprobs for row in rows),
        advantages=column(row.advantages for row in rows),
        versions=column((row.versions for row in rows), -1, np.int64),
        kv_versions=column((row.kv_versions for row in rows), -1, np.int64),
        temperature=torch.from_numpy(temperature[chosen]).to(device),
        kept=_kept_sets(flat, chosen, device),
        bias=_bias(flat, chosen, device),
        tops=_tops(flat, chosen, device),
        teachers=_teachers(flat, chosen, device),
        annotations={name: column(row.annotations[name] for row in rows) for name in names},
        denominators=dict(denominators),
        group=integers(_number_names([row.group for row in rows])),
        trajectory=integers(_number_names([row.trajectory for row in rows])),
        label=torch.tensor([row.label or 0.0 for row in rows], dtype=torch.float32, device=device),
    )


def _number_names(names: Sequence[str]) -> np.ndarray:
    """Number names from 0 in the order of first occurrence; equal names get equal numbers."""
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return np.array([numbers[name] for name in names], np.int64)


class _Flat:
    """Rows joined end to end, T tokens in total. A column has one value per token; it is filled row by row, then used
    as a whole."""

    def __init__(self, rows: Sequence[Sample]) -> None:
        self.rows = rows
        self.lengths = np.array([len(row.tokens) for row in rows], dtype=np.int64)
        self.offsets = np.concatenate(([0], self.lengths.cumsum()))
        self.tokens = self.column((row.tokens for row in rows), 0, np.int64)

    def column(self, values: Iterable[Sequence[float] | None], absent: float, dtype: type) -> np.ndarray:
        """Return a column [T] of the rows' values, with `absent` for rows without any."""
        code = "q" if np.issubdtype(dtype, np.integer) else "d"
        packed = bytearray()  # `struct` reads a tuple twice as fast as numpy does
        for of_row, length in zip(values, self.lengths.tolist(), strict=True):
            packed += struct.pack(f"{length}{code}", *((absent,) * length if of_row is None else of_row))
        return np.frombuffer(packed, code).astype(dtype)

    def of_each(self, values: Sequence[float] | range, dtype: type) -> np.ndarray:
        """Repeat one value per row for each of its tokens, [T]."""
        return np.repeat(np.array(values, dtype), self.lengths)


def _weights(flat: _Flat, terms: Sequence[str]) -> np.ndarray:
    """Return the weights of each term, [terms, T] float32."""
    weights = np.zeros((len(terms), len(flat.tokens)), np.float32)
    for term_index, term in enumerate(terms):
        weights[term_index] = flat.column((row.weights.get(term) for row in flat.rows), 0.0, np.float32)
    return weights


def _temperature(flat: _Flat, terms: Sequence[str], weights: np.ndarray) -> np.ndarray:
    """Return temperatures [T] as in `MicroBatch.temperature`. `weights` must still include tokens with an advantage of
    0, so that these tokens keep their sampling temperature."""
    sampled = [values for term, values in zip(terms, weights, strict=True) if term != "imitate"]
    imitated = [values for term, values in zip(terms, weights, strict=True) if term == "imitate"]
    temperatures = flat.of_each([row.temperature for row in flat.rows], np.float32)
    return np.where(np.any(imitated, axis=0) & ~np.any(sampled, axis=0), np.float32(1.0), temperatures)


def _mask_idle(flat: _Flat, terms: Sequence[str], weights: np.ndarray) -> np.ndarray:
    """Set the weights of policy tokens with an advantage of exactly 0 to 0."""
    if "policy" in terms:
        weights[terms.index("policy")] *= flat.column((row.advantages for row in flat.rows), 1.0, np.float64) != 0
    return weights


def _turns(flat: _Flat, marked: np.ndarray) -> np.ndarray:
    """Number the runs of `marked` tokens [T]; a run ends with its row. A token between runs has the earlier run's
    number."""
    begins = marked & ~np.concatenate(([False], marked[:-1]))
    begins[flat.offsets[:-1][flat.lengths > 0]] |= marked[flat.offsets[:-1][flat.lengths > 0]]
    numbers: np.ndarray = np.maximum(begins.cumsum() - 1, 0)
    return numbers


def _kept_sets(flat: _Flat, chosen: np.ndarray, device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the kept sets of the `chosen` tokens, indices [M] into the T tokens, as `MicroBatch.kept`."""
    if all(row.kept is None for row in flat.rows):
        return None
    per_token = [ids for row in flat.rows for ids in (row.kept.rows if row.kept else (b"",) * len(row.tokens))]
    sets = [per_token[token] for token in chosen.tolist()]
    offsets = np.cumsum([0, *(len(ids) // 4 for ids in sets)], dtype=np.int64)
    ids = np.frombuffer(b"".join(sets), "<i4").astype(np.int32)
    return torch.from_numpy(offsets).to(device), torch.from_numpy(ids).to(device)


def _bias(
    flat: _Flat, chosen: np.ndarray, device: torch.device | str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    if all(row.bias is None for row in flat.rows):
        return None
    per_token = [added for row in flat.rows for added in row.bias or ((),) * len(row.tokens)]
    rows = [per_token[token] for token in chosen.tolist()]
    pairs = [pair for row in rows for pair in row]
    offsets = torch.from_numpy(np.cumsum([0, *map(len, rows)], dtype=np.int64))
    ids = torch.tensor([token for token, _ in pairs], dtype=torch.int64)
    values = torch.tensor([value for _, value in pairs], dtype=torch.float32)
    return offsets.to(device), ids.to(device), values.to(device)


def _tops(flat: _Flat, chosen: np.ndarray, device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor] | None:
    if all(row.tops is None for row in flat.rows):
        return None
    per_token = [pairs for row in flat.rows for pairs in (row.tops.rows if row.tops else (b"",) * len(row.tokens))]
    rows = [np.frombuffer(per_token[token], [("id", "<u4"), ("logprob", "<f4")]) for token in chosen.tolist()]
    shape = (len(rows), max(map(len, rows), default=0))
    ids, logprobs = np.full(shape, -1, np.int64), np.full(shape, -np.inf, np.float32)
    for index, row in enumerate(rows):
        ids[index, : len(row)], logprobs[index, : len(row)] = row["id"], row["logprob"]
    return torch.from_numpy(ids).to(device), torch.from_numpy(logprobs).to(device)


def _teachers(flat: _Flat, chosen: np.ndarray, device: torch.device | str) -> dict[str, torch.Tensor]:
    named = sorted({row.teacher for row in flat.rows if row.teacher is not None})
    return {
        name: torch.from_numpy(flat.of_each([row.teacher == name for row in flat.rows], np.bool_)[chosen]).to(device)
        for name in named
    }


def _layout_and_predictors(flat: _Flat, chosen: np.ndarray) -> tuple[PrefixLayout, np.ndarray]:
    """Return the layout of the rows with weighted tokens, each cut before its last one, and the layout index [M] that
    predicts each `chosen` token."""
    counts = np.diff(np.searchsorted(chosen, flat.offsets))
    starts = flat.offsets[:-1][counts > 0]
    ends = chosen[counts.cumsum()[counts > 0] - 1]
    layout = lay_out([flat.tokens[start:end] for start, end in zip(starts, ends, strict=True)])
    layout_index = np.zeros(len(flat.tokens), np.int64)
    for start, end, path in zip(starts, ends, layout.paths, strict=True):
        layout_index[start:end] = path
    return layout, layout_index[chosen - 1]
