"""A generation step operation by operation, for every model, numerics and device.

Shapes: B sequences, N new rows, M sequences that sample, D width, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch

from sparring.kernels import ops
from sparring.model.attention import Paged
from sparring.model.causal import CausalModel
from sparring.model.states import RecurrentStates
from sparring.model.steps.rows import SampledTokens, Slots, StepRows, Top, kept_sets


class OperationStep:
    """Generation step, operation by operation, for every model, numerics and device."""

    most_steps = 1

    def __init__(
        self, model: CausalModel, pages: ops.KvPages, slots: Slots, states: RecurrentStates | None = None
    ) -> None:
        self._model, self._pages, self._slots, self._states = model, pages, slots, states

    def __call__(self, rows: StepRows) -> SampledTokens:
        return self.sample(rows, self.hidden(rows))

    def hidden(self, rows: StepRows) -> torch.Tensor:
        """Compute the hidden states [N, D] of the rows."""
        cu_rows, ends = (torch.frombuffer(values, dtype=torch.int32) for values in rows[1:3])
        tokens = torch.frombuffer(rows.tokens, dtype=torch.int64)
        width = -(-max(rows.lengths) // self._pages.page_size)
        tables = torch.from_numpy(self._slots.tables[rows.slots, :width])
        counts = cu_rows.diff()
        positions = torch.arange(len(tokens)) + torch.repeat_interleave(ends - cu_rows[1:], counts)
        recurrent = (
            None
            if self._states is None
            else (self._states, self._on_device(torch.from_numpy(self._slots.states[rows.slots])))
        )
        tokens, positions, tables = map(self._on_device, (tokens, positions, tables))
        where = ops.PagedRows(tables, self._on_device(cu_rows), self._on_device(ends), int(counts.max()))
        paged = Paged(self._pages, where, recurrent)
        adapters = self._slots.adapters[rows.slots]
        with self._model.adapters.assign_rows(np.repeat(adapters, np.diff(rows.cu_rows))):
            return self._model.hidden(tokens, positions, paged)

    def _on_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._model.device)

    def sample(self, rows: StepRows, hidden: torch.Tensor) -> SampledTokens:
        """Draw the next token of each sequence that samples, from hidden[N, D]."""
        if 1 not in rows.samples:
            return SampledTokens([], [], None, None)
        slots, cu_rows, ends = (torch.frombuffer(values, dtype=torch.int32) for values in rows[:3])
        sampling = torch.frombuffer(rows.samples, dtype=torch.bool)
        chosen = slots[sampling].numpy()
        logits = self._model.logits(hidden.index_select(0, self._on_device(cu_rows[1:][sampling] - 1)))
        if (self._slots.bias_counts[chosen] > 0).any() or self._slots.limited[chosen].any():
            for row, slot, length in zip(logits, chosen.tolist(), ends[sampling].tolist(), strict=True):
                self._slots.change(row, slot, length)
        own = self._slots
        drawn_by = (own.temperature, own.top_k, own.top_p, own.min_p, own.seeds.view(np.int64))
        requests = [torch.from_numpy(column[chosen]) for column in drawn_by]
        requests += [ends[sampling], torch.from_numpy(own.limited[chosen])]
        sampled, logprobs, masks = ops.sample(logits, *map(self._on_device, requests))
        kept = kept_sets(masks, [(i, i + 1) for i in range(len(sampled))])
        tops = self._tops(logits, chosen, kept) if self._slots.tops[chosen].any() else None
        return SampledTokens(sampled.unsqueeze(1).tolist(), logprobs.unsqueeze(1).tolist(), kept, tops)

    def _tops(self, logits: torch.Tensor, chosen: np.ndarray, kept: list[list[bytes]] | None) -> list[list[Top]]:
        """Return the most likely tokens of logits [M, V] of slots [M], each row limited to its kept ids."""
        tops: list[list[Top]] = []
        for n, slot in enumerate(chosen.tolist()):
            ids = np.frombuffer(bytearray(kept[n][0] if kept else b""), np.int32)
            wide = logits[n, ids] if len(ids) else logits[n]
            order = wide.sort(descending=True, stable=True).indices[: self._slots.tops[slot]]
            best = self._on_device(torch.from_numpy(ids))[order].long() if len(ids) else order
            sets = (
                (len(ids) * torch.arange(len(best) + 1), torch.from_numpy(np.tile(ids, len(best))))
                if len(ids)
                else None
            )
            sets = None if sets is None else (self._on_device(sets[0]), self._on_device(sets[1]))
            heat = torch.full((len(best),), float(self._slots.temperature[slot]), device=logits.device)
            logprobs, _ = ops.token_logprobs(logits[n].expand(len(best), -1), best, heat, sets)
            tops.append([tuple(zip(best.tolist(), logprobs.tolist(), strict=True))])
        return tops
