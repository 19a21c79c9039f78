"""Steps of generation on a GPU: the sequences with one new token replay a CUDA graph for one of a few batch sizes.

A graph samples the next tokens and uses them as its own input, so several steps run without the CPU. Rows that pad a
batch belong to no sequence: they write nothing and do not change the bits of other rows. On the CPU, where Triton is
interpreted, the same operations run without a graph. Shapes: B sequences, n rows of a graph, P pages of a table, S
slots.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from sparring.kernels import ops
from sparring.kernels.paths import path_of
from sparring.model.attention import Paged
from sparring.model.causal import CausalModel
from sparring.model.layers import Product, RowLinear
from sparring.model.lora import Adapter
from sparring.model.steps.rows import SampledTokens, Slots, StepRows

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Batch sizes of graphs; each graph is captured at its first use."""

TOKEN, LENGTH, SEED, TEMPERATURE, COUNT = range(5)
"""Rows of a graph's state [5, n] int64: new token of a sequence, its length with that token, its seed, its temperature
as the bits of a float64, and the number of the n rows that are sequences."""


class DecodeGraph:
    """Decode step of up to n sequences over fixed tensors. All have the adapter `number`, or none for -1.

    Attributes:
        state: [5, n] int64, input; advanced to the next step.
        tables: [n, P] int32, input.
        tokens: [n] int64, output.
        logprobs: [n] float32, output.
    """

    def __init__(self, model: CausalModel, pages: ops.KvPages, size: int, pages_per_table: int, number: int) -> None:
        self._model, self._pages, self._numbers = model, pages, np.full(size, number)
        device = model.device
        self.state = torch.zeros(5, size, dtype=torch.int64, device=device)
        self.tables = torch.zeros(size, pages_per_table, dtype=torch.int32, device=device)
        self.tokens = torch.zeros(size, dtype=torch.int64, device=device)
        self.logprobs = torch.zeros(size, device=device)
        zeros = torch.zeros(size, device=device)
        self._whole = (zeros.long(), zeros + 1, zeros, zeros.byte())  # settings that truncate nothing
        self._offsets = torch.arange(size + 1, dtype=torch.int32, device=device)
        self.replay: Callable[[], None] = self._capture() if device.type == "cuda" else self._step

    @torch.no_grad()
    def _step(self) -> None:
        state = self.state
        lengths = state[LENGTH].to(torch.int32)
        cu_rows = torch.minimum(self._offsets, state[COUNT, 0].to(torch.int32))
        where = Paged(self._pages, ops.PagedRows(self.tables, cu_rows, lengths, 1))
        with self._model.adapters.assign_rows(self._numbers):
            hidden = self._model.hidden(state[TOKEN], (state[LENGTH] - 1).clamp(min=0), where)
        logits = self._model.logits(hidden)
        temperature = state[TEMPERATURE].view(torch.float64).float()
        top_k, top_p, min_p, limited = self._whole
        requests = (temperature, top_k, top_p, min_p, state[SEED], state[LENGTH], limited)
        tokens, logprobs = path_of(logits).sample(logits, requests, None)
        self.tokens.copy_(tokens)
        self.logprobs.copy_(logprobs)
        state[TOKEN].copy_(tokens)
        state[LENGTH].add_(state[COUNT, 0] > 0)

    def _capture(self) -> Callable[[], None]:
        """Capture the step. No row is a sequence yet, so the warm-up runs write nothing into the pages."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # the trainer's thread may allocate meanwhile
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._step()
        return graph.replay


class DeviceStep:
    """Steps of a `LlamaDecoder` on a GPU. One graph computes plain replies of the most frequent adapter, or of none;
    `others` computes all other rows, operation by operation (prompts; truncated, limited or biased sampling; most
    likely tokens; other adapters). Both give the same numbers to the bit."""

    most_steps = 16

    def __init__(
        self,
        model: CausalModel,
        pages: ops.KvPages,
        slots: Slots,
        others: Callable[[StepRows], SampledTokens],
        *,
        batches: tuple[int, ...] = BATCHES,
    ) -> None:
        self._model, self._pages, self._slots, self._others = model, pages, slots, others
        self._batches = batches
        self._graphs: dict[tuple[int, Adapter | None], DecodeGraph] = {}
        self._pointers: list[int] = []

    def __call__(self, rows: StepRows) -> SampledTokens:
        """Compute the rows, up to `rows.steps` steps; one step if some rows have no graph."""
        replies = self._replies(rows)
        if replies.all():
            return self._replay(rows)
        if not replies.any():
            return self._others(rows)
        # first the replies: a sequence that is new may read keys that these write, not the other way round
        sampled = self._replay(rows.part(replies))
        return sampled.interleaved(self._others(rows.part(~replies)), replies[np.asarray(rows.samples) == 1])

    def _replay(self, rows: StepRows) -> SampledTokens:
        slots = np.frombuffer(rows.slots, np.int32)
        size = next(size for size in self._batches if size >= len(slots))
        graph = self._graph(size, int(self._slots.adapters[slots[0]]))
        self._fill(graph, rows, slots)
        taken = []
        for step in range(rows.steps):
            if step and rows.interrupt[0]:
                break
            graph.replay()
            taken.append((graph.tokens[: len(slots)].clone(), graph.logprobs[: len(slots)].clone()))
        tokens, logprobs = (torch.stack(parts, 1).cpu() for parts in zip(*taken, strict=True))
        count = _until_stop(tokens.numpy(), self._slots.stops[slots])
        return SampledTokens(tokens[:, :count].tolist(), logprobs[:, :count].tolist(), None, None)

    def _replies(self, rows: StepRows) -> np.ndarray:
        """Return a mask [B] of sequences that one graph can compute: plain replies of the most frequent adapter."""
        own, slots = self._slots, np.frombuffer(rows.slots, np.int32)
        one, samples, entered = np.diff(rows.cu_rows) == 1, np.asarray(rows.samples), np.asarray(rows.entered)
        plain: np.ndarray = one & (samples == 1) & (entered == 0)
        plain &= ~own.bias_counts[slots].any(1) & (own.tops[slots] == 0) & ~own.truncated(rows.slots)
        numbers = own.adapters[slots]
        if plain.any():
            plain &= numbers == np.bincount(numbers[plain] + 1).argmax() - 1
        plain &= plain.cumsum() <= self._batches[-1]
        return plain

    def _fill(self, graph: DecodeGraph, rows: StepRows, slots: np.ndarray) -> None:
        """Fill the graph's inputs with two copies to the device."""
        state = np.zeros((5, graph.state.shape[1]), np.int64)
        state[TOKEN, : len(slots)], state[LENGTH, : len(slots)] = rows.tokens, rows.lengths
        state[SEED, : len(slots)] = self._slots.seeds[slots].view(np.int64)
        state[TEMPERATURE, : len(slots)] = self._slots.temperature[slots].astype(np.float64).view(np.int64)
        state[COUNT] = len(slots)
        width = -(-(max(rows.lengths) + rows.steps - 1) // self._pages.page_size)
        tables = np.ascontiguousarray(self._slots.tables[slots, :width])
        graph.state.copy_(torch.from_numpy(state))
        graph.tables[: len(slots), : tables.shape[1]].copy_(torch.from_numpy(tables))

    def _graph(self, size: int, number: int) -> DecodeGraph:
        """Return the graph of a size and an adapter's number. All graphs are captured again if a tensor of the model
        was replaced; values that change in place need no capture."""
        pointers, adapters = _pointers_of(self._model), self._model.adapters.by_number
        if pointers != self._pointers:
            self._graphs.clear()
            self._pointers = pointers
        adapter = adapters.get(number)
        if (size, adapter) not in self._graphs:
            served = {None, *adapters.values()}
            self._graphs = {key: graph for key, graph in self._graphs.items() if key[1] in served}
            width = self._slots.tables.shape[1]
            self._graphs[size, adapter] = DecodeGraph(self._model, self._pages, size, width, number)
        return self._graphs[size, adapter]


def _until_stop(tokens: np.ndarray, stops: np.ndarray) -> int:
    """Count the steps of tokens [B, steps] up to the first in which a sequence samples one of its stops [B, 8]."""
    stopped = (tokens[:, :, None] == stops[:, None, :]).any(2).any(0)
    return int(stopped.argmax()) + 1 if stopped.any() else tokens.shape[1]


def _pointers_of(model: CausalModel) -> list[int]:
    decoder, head = model.decoder, model.head
    assert decoder is not None and isinstance(head, RowLinear)  # steps on a device are of a decoder's
    norms = [decoder.norm, *(norm for layer in decoder.layers for norm in layer.norms)]
    products: list[Product] = [head.product, *(product for layer in decoder.layers for product in layer.products)]
    tensors: list[torch.Tensor] = [
        decoder.embedding.weight,
        *(norm.weight for norm in norms),
        *(product.packed.storage for product in products),
    ]
    tensors += [product.bias for product in products if product.bias is not None]
    return [tensor.data_ptr() for tensor in tensors]
