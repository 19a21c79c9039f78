"""Rows of one generation step and the tokens that it samples. Settings of running requests are stored by slot.

Shapes: B sequences, N new rows, M sequences that sample, P pages of a table, S slots.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from sparring.kernels.compiled.decoder_step import BIASES, STOPS
from sparring.kernels.truncation import ids_of, no_masks


class Slots(NamedTuple):
    """Settings of running requests, by slot; the caller changes them in place.

    Attributes:
        tables: [S, P] int32, page tables.
        temperature: [S] float32.
        top_k: [S] int64.
        top_p: [S] float32.
        min_p: [S] float32.
        seeds: [S] uint64.
        stops: [S, 8] int64, tokens after which a sequence takes no further step; -1 for none.
        bias_ids: [S, 512] int32, tokens whose logits are biased.
        bias_values: [S, 512] float32, values that are added to their logits.
        bias_counts: [S, 2] int32. A sequence with fewer than bias_until[s] tokens uses the first bias_counts[s, 1]
            biases; a longer one uses only those from bias_counts[s, 0] on.
        bias_until: [S] int64.
        limited: [S] uint8, whether only tokens with a bit in `allowed` may be sampled.
        allowed: [S, ceil(V / 64)] uint64.
        tops: [S] int32, number of most likely tokens to return, at most 20.
        adapters: [S] int32, number of the sequence's adapter; -1 for none.
        states: [S] int64, slot of the sequence's recurrent state.
    """

    tables: np.ndarray
    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray
    seeds: np.ndarray
    stops: np.ndarray
    bias_ids: np.ndarray
    bias_values: np.ndarray
    bias_counts: np.ndarray
    bias_until: np.ndarray
    limited: np.ndarray
    allowed: np.ndarray
    tops: np.ndarray
    adapters: np.ndarray
    states: np.ndarray

    @staticmethod
    def of(num_slots: int, pages_per_table: int, vocabulary: int) -> Slots:
        """Make slots with empty tables, temperature 1, no truncation, no stops, no bias."""
        return Slots(
            np.zeros((num_slots, pages_per_table), np.int32),
            np.ones(num_slots, np.float32),
            np.zeros(num_slots, np.int64),
            np.ones(num_slots, np.float32),
            np.zeros(num_slots, np.float32),
            np.zeros(num_slots, np.uint64),
            np.full((num_slots, STOPS), -1, np.int64),
            np.zeros((num_slots, BIASES), np.int32),
            np.zeros((num_slots, BIASES), np.float32),
            np.zeros((num_slots, 2), np.int32),
            np.zeros(num_slots, np.int64),
            np.zeros(num_slots, np.uint8),
            no_masks(num_slots, vocabulary),
            np.zeros(num_slots, np.int32),
            np.full(num_slots, -1, np.int32),
            np.zeros(num_slots, np.int64),
        )

    def bias(self, slot: int, until: int, banned: Sequence[int], added: Sequence[tuple[int, float]]) -> None:
        """Forbid tokens until the sequence has `until` tokens, and add values to logits; at most 512 entries, each
        token once in each list."""
        count = len(banned) + len(added)
        self.bias_counts[slot], self.bias_until[slot] = (len(banned), count), until
        self.bias_ids[slot, :count] = [*banned, *(token for token, _ in added)]
        self.bias_values[slot, :count] = [*[-np.inf] * len(banned), *(value for _, value in added)]

    def limit(self, slot: int, allowed: bytes | None) -> None:
        """Limit the sequence to tokens with a bit in `allowed`, lowest first; None for all."""
        self.limited[slot] = allowed is not None
        if allowed is not None:
            self.allowed[slot] = 0
            self.allowed.view(np.uint8)[slot, : len(allowed)] = np.frombuffer(allowed, np.uint8)

    def change(self, row: torch.Tensor, slot: int, length: int) -> None:
        """Apply biases and limits to the logits [V] of a sequence of `length` tokens, in place."""
        first, end = self.bias_counts[slot]
        places = slice(0 if length < self.bias_until[slot] else first, end)
        for token, value in zip(
            self.bias_ids[slot, places].tolist(), self.bias_values[slot, places].tolist(), strict=True
        ):
            row[token] += value
        if self.limited[slot]:
            bits = np.unpackbits(self.allowed[slot].view(np.uint8), bitorder="little")[: len(row)]
            row[torch.from_numpy(bits == 0).to(row.device)] = -torch.inf

    def adapted(self, slots: array[int]) -> bool:
        """Return True if any slot of `slots` ("i") has an adapter."""
        return bool((self.adapters[np.frombuffer(slots, np.int32)] >= 0).any())

    def truncated(self, slots: array[int]) -> np.ndarray:
        """Return which of `slots` ("i") [B] truncate their distribution."""
        at = np.frombuffer(slots, np.int32)
        cut: np.ndarray = (self.top_k[at] > 0) | (self.top_p[at] < 1) | (self.min_p[at] > 0) | (self.limited[at] > 0)
        return cut


class StepRows(NamedTuple):
    """New rows (N) of a step's B sequences, as `ops.PagedRows`, in arrays, fastest to fill ("i", "q", "B": typecodes).

    Attributes:
        slots: "i" [B].
        cu_rows: "i" [B + 1].
        lengths: "i" [B], including the new rows.
        tokens: "q" [N].
        samples: "B" [B], 1 if the last row samples the next token.
        entered: "B" [B], 1 if the sequence is new in its slot: it may read keys that others write in this call.
        steps: maximum number of steps to run; above 1 only if sequences are independent, all sample, and have pages for
            these steps. All sequences stop early if one samples a stop token or another thread sets
            interrupt[0].
        interrupt: "i" [1].
    """

    slots: array[int]
    cu_rows: array[int]
    lengths: array[int]
    tokens: array[int]
    samples: array[int]
    entered: array[int]
    steps: int
    interrupt: array[int]

    @property
    def independent(self) -> bool:
        """True if every sequence has one row and none reads keys that another sequence writes in this call."""
        return len(self.tokens) == len(self.slots) and 1 not in self.entered

    def part(self, chosen: np.ndarray) -> StepRows:
        """Return one step of the sequences with chosen[B] True."""
        names, counts = ("slots", "lengths", "samples", "entered"), np.diff(self.cu_rows)
        parts = {name: _where(getattr(self, name), chosen) for name in names}
        parts["cu_rows"] = array("i", [0, *np.cumsum(counts[chosen]).tolist()])
        return self._replace(**parts, tokens=_where(self.tokens, np.repeat(chosen, counts)), steps=1)


def _where(values: array[int], chosen: np.ndarray) -> array[int]:
    return array(values.typecode, np.asarray(values)[chosen].tobytes())


Top = tuple[tuple[int, float], ...]
"""Most likely tokens of one draw, best first (ties by id), each with its log-probability."""


class SampledTokens(NamedTuple):
    """Tokens and log-probabilities of the sequences that sample: [M] lists with one entry per step.

    Attributes:
        kept: ids that each token was drawn from, empty without truncation (see `types.KeptSets`); None if no draw was
            truncated.
        tops: most likely tokens of each draw, empty if not requested; None if no sequence requested them.
    """

    tokens: list[list[int]]
    logprobs: list[list[float]]
    kept: list[list[bytes]] | None
    tops: list[list[Top]] | None

    def interleaved(self, others: SampledTokens, ours: np.ndarray) -> SampledTokens:
        """Merge these tokens with those of `others`; ours[M] is True where a sequence is one of `self`. Both have one
        step. `self` has no truncated draws and no most likely tokens."""

        def joined(one: list[Any], other: list[Any]) -> list[Any]:
            parts = iter(other), iter(one)
            return [next(parts[its]) for its in ours.tolist()]

        count, (tokens, logprobs, kept, tops) = len(self.tokens), others
        kept = None if kept is None else joined([[b""]] * count, kept)
        tops = None if tops is None else joined([[()]] * count, tops)
        return SampledTokens(joined(self.tokens, tokens), joined(self.logprobs, logprobs), kept, tops)


def kept_sets(masks: np.ndarray | None, bounds: Sequence[tuple[int, int]]) -> list[list[bytes]] | None:
    """Return the kept sets of each sequence. bounds[i] is the range of rows of `masks` [N, W] that belong to sequence
    i."""
    if masks is None:
        return None
    sets = ids_of(masks)
    return [sets[begin:end] for begin, end in bounds] if any(sets) else None


def likeliest(ids: np.ndarray, logprobs: np.ndarray, bounds: Sequence[tuple[int, int]]) -> list[list[Top]]:
    """Return the most likely tokens at each draw of each sequence. bounds[i] is the range of rows of `ids` and
    `logprobs` [N, 20] that belong to sequence i; an id of -1 is padding."""
    counts, ids, logprobs = (ids >= 0).sum(1).tolist(), ids.tolist(), logprobs.tolist()
    draws = [tuple(zip(ids[n][:count], logprobs[n][:count], strict=True)) for n, count in enumerate(counts)]
    return [draws[begin:end] for begin, end in bounds]
