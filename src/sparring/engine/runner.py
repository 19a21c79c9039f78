"""From the chunks of a step to sampled tokens: the tensors, the forward and the sampler.

Shapes: B sequences, N new tokens, P pages per sequence, M sequences that sample, D width.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows

import numpy as np
import torch

from sparring.engine.scheduler import Chunk
from sparring.engine.sequence import Sequence
from sparring.model.attention import Packed, Paged
from sparring.model.causal import CausalModel
from sparring.model.head import token_quantities
from sparring.model.kernels import ops
from sparring.model.step import Slots, StepRows

MASK_64 = (1 << 64) - 1


class Runner:
    """Holds the pages and, per slot, what a running request needs in every step, so that a step copies little."""

    def __init__(self, model: CausalModel, *, num_pages: int, page_size: int, max_running: int) -> None:
        self._model = model
        self._pages = ops.KvPages(
            num_layers=model.num_layers,
            num_pages=num_pages,
            page_size=page_size,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            dtype=model.dtype,
        )
        longest = min(num_pages, -(-model.max_positions // page_size))
        self._slots = Slots.of(max_running, longest)
        self._page_size = page_size
        self._compute = model.decoder_step(self._pages, self._slots) or self._operation_by_operation

    def step(self, chunks: list[Chunk]) -> tuple[list[int], list[float]]:
        """Compute the chunks; sample for those that say so, in their order.

        Returns:
            Tokens and log-probabilities [M].
        """
        tokens, logprobs = self._compute(self._rows(chunks))
        return tokens.tolist(), logprobs.tolist()

    def score(self, rows: Rows[Rows[int]], temperature: float) -> list[list[float]]:
        """Log-probabilities of tokens[1:] of each row under softmax(logits / temperature), without touching the cache."""
        bodies = [torch.tensor(row[:-1], dtype=torch.int64) for row in rows]
        positions = torch.cat([torch.arange(len(body)) for body in bodies])
        hidden = self._model.hidden(torch.cat(bodies), positions, Packed.of([len(body) for body in bodies]))
        targets = torch.cat([torch.tensor(row[1:], dtype=torch.int64) for row in rows])
        heat = torch.full((len(targets),), temperature)
        logprobs = token_quantities(self._model, hidden, targets, heat, {"logprob"})["logprob"]
        return [part.tolist() for part in logprobs.split([len(body) for body in bodies])]

    def _rows(self, chunks: list[Chunk]) -> StepRows:
        sequences = [chunk.sequence for chunk in chunks]
        known = [self._note(sequence) for sequence in sequences]
        count = len(chunks)
        cu_rows = np.zeros(count + 1, np.int32)
        np.cumsum([chunk.count for chunk in chunks], out=cu_rows[1:])
        single = cu_rows[-1] == count
        if single:
            tokens = [chunk.sequence.tokens[chunk.begin] for chunk in chunks]
        else:
            tokens = [token for chunk in chunks for token in chunk.sequence.tokens[chunk.begin : chunk.begin + chunk.count]]
        return StepRows(
            slots=np.array([sequence.slot for sequence in sequences], np.int32),
            cu_rows=cu_rows,
            lengths=np.array([chunk.begin + chunk.count for chunk in chunks], np.int32),
            tokens=np.array(tokens, np.int64),
            samples=np.array([chunk.samples for chunk in chunks]),
            # a page that another sequence fills in this step is only found by one that is admitted in it
            independent=bool(single) and all(known),
        )

    def _operation_by_operation(self, rows: StepRows) -> tuple[torch.Tensor, torch.Tensor]:
        """What `DecoderStep` does, for every model and every numerics."""
        slots, ends = rows.slots, torch.from_numpy(rows.lengths)
        cu_rows = torch.from_numpy(rows.cu_rows)
        width = -(-int(rows.lengths.max()) // self._page_size)
        tables = torch.from_numpy(self._slots.tables[slots, :width])
        counts = cu_rows.diff()
        positions = torch.arange(len(rows.tokens)) + torch.repeat_interleave(ends - cu_rows[1:], counts)
        where = Paged(self._pages, ops.PagedRows(tables, cu_rows, ends))
        hidden = self._model.hidden(torch.from_numpy(rows.tokens), positions, where)
        sampling = torch.from_numpy(rows.samples)
        if not rows.samples.any():
            return torch.empty(0, dtype=torch.int64), torch.empty(0)
        chosen = slots[rows.samples]
        return ops.sample(
            self._model.logits(hidden.index_select(0, cu_rows[1:][sampling].long() - 1)),
            torch.from_numpy(self._slots.temperature[chosen]),
            torch.from_numpy(self._slots.top_k[chosen]),
            torch.from_numpy(self._slots.top_p[chosen]),
            torch.from_numpy(self._slots.seeds[chosen]),
            ends[sampling].long(),
        )

    def _note(self, sequence: Sequence) -> int:
        """Bring a sequence's slot up to date; pages are only ever appended while it runs. How many were known before."""
        known, pages = sequence.table_length, sequence.pages
        if known == len(pages):
            return known
        slots, slot = self._slots, sequence.slot
        if known == 0:
            sampling = sequence.request.sampling
            slots.temperature[slot], slots.top_k[slot], slots.top_p[slot] = sampling.temperature, sampling.top_k, sampling.top_p
            slots.seeds[slot] = sampling.seed & MASK_64
        slots.tables[slot, known : len(pages)] = pages[known:]
        sequence.table_length = len(pages)
        return known
