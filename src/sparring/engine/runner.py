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
        self._tables = np.zeros((max_running, longest), np.int32)
        self._temperature = np.ones(max_running, np.float32)
        self._top_k = np.zeros(max_running, np.int64)
        self._top_p = np.ones(max_running, np.float32)
        self._seeds = np.zeros(max_running, np.uint64)
        self._page_size = page_size

    def step(self, chunks: list[Chunk]) -> tuple[list[int], list[float]]:
        """Compute the chunks; sample for those that say so, in their order.

        Returns:
            Tokens and log-probabilities [M].
        """
        for chunk in chunks:
            self._note(chunk.sequence)
        slots = np.array([chunk.sequence.slot for chunk in chunks])
        counts = np.array([chunk.count for chunk in chunks], np.int32)
        ends = np.array([chunk.begin + chunk.count for chunk in chunks], np.int32)
        width = -(-int(ends.max()) // self._page_size)
        cu_rows = np.zeros(len(chunks) + 1, np.int32)
        np.cumsum(counts, out=cu_rows[1:])
        if cu_rows[-1] == len(chunks):
            tokens = np.array([chunk.sequence.tokens[chunk.begin] for chunk in chunks])
            positions = ends.astype(np.int64) - 1
        else:
            tokens = np.concatenate([chunk.sequence.tokens[chunk.begin : chunk.begin + chunk.count] for chunk in chunks])
            positions = np.concatenate([np.arange(chunk.begin, chunk.begin + chunk.count) for chunk in chunks])
        rows = ops.PagedRows(
            torch.from_numpy(self._tables[slots, :width]), torch.from_numpy(cu_rows), torch.from_numpy(ends)
        )
        hidden = self._model.hidden(torch.from_numpy(tokens), torch.from_numpy(positions), Paged(self._pages, rows))
        sampling = [index for index, chunk in enumerate(chunks) if chunk.samples]
        if not sampling:
            return [], []
        return self._sample(hidden, cu_rows[1:][sampling] - 1, slots[sampling], ends[sampling])

    def score(self, rows: Rows[Rows[int]], temperature: float) -> list[list[float]]:
        """Log-probabilities of tokens[1:] of each row under softmax(logits / temperature), without touching the cache."""
        bodies = [torch.tensor(row[:-1], dtype=torch.int64) for row in rows]
        positions = torch.cat([torch.arange(len(body)) for body in bodies])
        hidden = self._model.hidden(torch.cat(bodies), positions, Packed.of([len(body) for body in bodies]))
        targets = torch.cat([torch.tensor(row[1:], dtype=torch.int64) for row in rows])
        heat = torch.full((len(targets),), temperature)
        logprobs = token_quantities(self._model, hidden, targets, heat, {"logprob"})["logprob"]
        return [part.tolist() for part in logprobs.split([len(body) for body in bodies])]

    def _sample(
        self, hidden: torch.Tensor, last: np.ndarray, slots: np.ndarray, positions: np.ndarray
    ) -> tuple[list[int], list[float]]:
        """hidden[N, D]; last[M] rows to sample from; slots[M]; positions[M] of the tokens to be sampled."""
        if len(last) < len(hidden):
            hidden = hidden.index_select(0, torch.from_numpy(last.astype(np.int64)))
        tokens, logprobs = ops.sample(
            self._model.logits(hidden),
            torch.from_numpy(self._temperature[slots]),
            torch.from_numpy(self._top_k[slots]),
            torch.from_numpy(self._top_p[slots]),
            torch.from_numpy(self._seeds[slots]),
            torch.from_numpy(positions.astype(np.int64)),
        )
        return tokens.tolist(), logprobs.tolist()

    def _note(self, sequence: Sequence) -> None:
        """Bring a sequence's row of the tables up to date; pages are only ever appended while it runs."""
        known, pages = sequence.table_length, sequence.pages
        if known == len(pages):
            return
        if known == 0:
            sampling, slot = sequence.request.sampling, sequence.slot
            self._temperature[slot], self._top_k[slot], self._top_p[slot] = sampling.temperature, sampling.top_k, sampling.top_p
            self._seeds[slot] = sampling.seed & MASK_64
        self._tables[sequence.slot, known : len(pages)] = pages[known:]
        sequence.table_length = len(pages)
