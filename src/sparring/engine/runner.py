"""Computation of a step: from chunks to sampled tokens, by the model's forward and the sampler.

Shapes: B sequences, N new tokens, P pages per sequence, M sequences that sample, D width.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterable
from collections.abc import Sequence as Rows
from itertools import accumulate
from operator import add

import numpy as np
import torch

from sparring.engine.cache.kv import PageCopy
from sparring.engine.scheduler import Chunk
from sparring.engine.sequence import Sequence
from sparring.engine.sizes import Sizes
from sparring.generation import ScoreRequest
from sparring.kernels import ops
from sparring.kernels.memory import discard, give_back
from sparring.model.attention import Packed
from sparring.model.causal import CausalModel
from sparring.model.head import score_tokens
from sparring.model.staging import held
from sparring.model.states import RecurrentStates
from sparring.model.steps.choose import step_of
from sparring.model.steps.device import DeviceStep
from sparring.model.steps.operations import OperationStep
from sparring.model.steps.rows import SampledTokens, Slots, StepRows

MASK_64 = (1 << 64) - 1
FAST_TOLERANCE = 5e-2
"""Largest accepted difference of a probe's log-probabilities under fast numerics, in which trainer and engine round
differently."""


class Runner:
    """Computation of steps, with the pages of the cache, and data of running requests by slot so that a step copies
    little."""

    def __init__(self, model: CausalModel, sizes: Sizes, *, page_size: int, max_running: int) -> None:
        self._model = model
        self._pages = ops.KvPages(
            model.kv_heads,
            # one additional page, slot and state for the probe
            num_pages=sizes.num_pages + 1,
            page_size=page_size,
            dtype=model.dtype,
            device=model.device,
            transposed=ops.transposes_keys(model.device),
        )
        self._host = HostPages(self._pages, sizes.host_pages)
        self._states = RecurrentStates(model.recurrent, sizes.num_states + 1) if model.recurrent else None
        longest = min(sizes.num_pages, -(-model.max_positions // page_size))
        self._slots = Slots.of(max_running + 1, longest, model.vocab_size)
        self._slots.tables[max_running, 0], self._slots.temperature[max_running] = sizes.num_pages, 0.0
        self._slots.states[max_running] = sizes.num_states
        self.tolerance = FAST_TOLERANCE if model.path_name == "fast" else 0.0
        self._compute = step_of(model, self._pages, self._slots, self._states)
        self.keeps_tensors = isinstance(self._compute, DeviceStep)  # at an update: graphs read them
        self._operations = OperationStep(model, self._pages, self._slots, self._states)
        self._interrupt = array("i", [0])

    @property
    def most_steps(self) -> int:
        """Maximum number of steps of one call of `step`."""
        return self._compute.most_steps

    def step(self, chunks: list[Chunk], steps: int) -> SampledTokens:
        """Compute the chunks, and sample for chunks with `samples`, in their order. Repeat this for up to `steps` steps
        in all; more than one step is allowed only if all chunks generate. Scores are added to their sequences."""
        rows = self._rows(chunks, steps)
        if 0 not in rows.samples or not any(map(_is_scored, chunks)):
            return self._compute(rows)
        hidden = self._operations.hidden(rows)
        for chunk, begin in zip(chunks, rows.cu_rows, strict=False):
            if _is_scored(chunk):
                self._score(chunk, hidden[begin : begin + chunk.count])
        return self._operations.sample(rows, hidden)

    def copy(self, copies: list[PageCopy]) -> float:
        """Copy pages in this order; return the seconds that it took."""
        started = time.perf_counter()
        for way, source, target in copies:
            if way == "within":
                self._pages.copy_page(source, target)
            elif way == "out":
                self._host.put(self._pages, source, target)
            else:
                self._host.get(self._pages, source, target)
        return time.perf_counter() - started if copies else 0.0

    def copy_states(self, slots: Rows[tuple[int, int]]) -> None:
        """Copy recurrent states, given as (from, to) slots, in this order."""
        for source, target in slots:
            assert self._states is not None  # slots are those of its states
            self._states.copy(source, target)

    def discard(self) -> None:
        """Return the memory of the weights, of all pages and of all states to the system; their values are lost."""
        states = [] if self._states is None else self._states.tensors
        discard([*held(self._model), *self._pages.tensors, *self._host.tensors, *states])
        give_back(0)

    def interrupt(self, wanted: bool) -> None:
        """Ask a running call of several steps to return after its current step; `wanted` = False clears this.
        Thread-safe."""
        self._interrupt[0] = wanted

    def probe(self, tokens: Rows[int], adapter: int = -1) -> tuple[list[float], list[float], list[float]]:
        """Compute a probe under the present weights and an adapter (-1: none). Return the log-probabilities of
        tokens[1:] by the trainer's forward; the log-probability of the token that one generation step draws after a
        prefix of at most one page; and that token's log-probability by the trainer's forward."""
        device = self._model.device
        row, targets = (torch.tensor(part, device=device) for part in (tokens[:-1], tokens[1:]))
        with self._model.adapters.assign_rows(np.full(len(row), adapter)):
            hidden = self._model.hidden(row, torch.arange(len(row), device=device), Packed.of([len(row)]).to(device))
        logprobs = score_tokens(self._model, hidden, targets, torch.ones(len(row), device=device), 0).logprob.tolist()
        few = min(len(row), self._pages.page_size)
        self._slots.adapters[-1] = adapter
        step = StepRows(
            slots=array("i", [len(self._slots.tables) - 1]),
            cu_rows=array("i", [0, few]),
            lengths=array("i", [few]),
            tokens=array("q", tokens[:few]),
            samples=array("B", [1]),
            entered=array("B", [0]),
            steps=1,
            interrupt=array("i", [0]),
        )
        sampled = self._compute(step)
        drawn = torch.tensor(sampled.tokens[0], device=device)
        likeliest = score_tokens(self._model, hidden[few - 1 : few], drawn, torch.ones(1, device=device), 0)
        return logprobs, sampled.logprobs[0], likeliest.logprob.tolist()

    def _score(self, chunk: Chunk, hidden: torch.Tensor) -> None:
        """Append the requested scores of a chunk's tokens to its sequence. `hidden` [count, D] is the model's output at
        these tokens."""
        sequence, begin, count, _ = chunk
        request, scored_from = sequence.request, sequence.scored_from
        assert isinstance(request, ScoreRequest) and scored_from is not None
        first = max(begin, scored_from)
        targets = torch.tensor(request.tokens[first + 1 : begin + count + 1], device=hidden.device)
        temperature = torch.full((len(targets),), request.temperature, device=hidden.device)
        judged = score_tokens(self._model, hidden[first - begin :], targets, temperature, request.top_k)
        logprobs, entropies, ids, likeliest = (values.tolist() for values in judged)
        sequence.scores.append((logprobs, entropies, ids, likeliest))

    def _rows(self, chunks: list[Chunk], steps: int) -> StepRows:
        sequences, begins, counts, samples = zip(*chunks, strict=True)
        # only a sequence admitted in this step can read a page that another one fills in it
        entered = array("B", [sequence.stale and self._note(sequence) for sequence in sequences])
        for sequence in sequences:
            if sequence.allowed is not None:
                self._slots.limit(sequence.slot, sequence.allowed or None)
                self._slots.bias_until[sequence.slot] = 0 if sequence.allowed else np.iinfo(np.int64).max
        if all(count == 1 for count in counts):
            cu_rows: Iterable[int] = range(len(chunks) + 1)
            tokens = [sequence.tokens[begin] for sequence, begin in zip(sequences, begins, strict=True)]
        else:
            cu_rows = accumulate(counts, initial=0)
            tokens = [token for sequence, begin, count, _ in chunks for token in sequence.tokens[begin : begin + count]]
        rows = StepRows(
            slots=array("i", [sequence.slot for sequence in sequences]),
            cu_rows=array("i", cu_rows),
            lengths=array("i", map(add, begins, counts)),
            tokens=array("q", tokens),
            samples=array("B", samples),
            entered=entered,
            steps=steps,
            interrupt=self._interrupt,
        )
        return rows if rows.independent else rows._replace(steps=1)

    def _note(self, sequence: Sequence) -> bool:
        """Update the data of a sequence's slot: to the pages of a running sequence, others are only appended. Return
        whether the sequence is new in the slot."""
        num_pages, pages = sequence.table_length, sequence.pages
        slots, slot = self._slots, sequence.slot
        if num_pages == 0:
            sampling = sequence.sampling
            slots.temperature[slot], slots.min_p[slot] = sampling.temperature, sampling.min_p
            slots.top_k[slot], slots.top_p[slot] = sampling.top_k, sampling.top_p
            slots.seeds[slot] = sampling.seed & MASK_64
            slots.tops[slot] = sampling.top_logprobs
            slots.adapters[slot] = sequence.served.number
            slots.limit(slot, None)
            slots.states[slot] = sequence.state or 0
            preface = sequence.generated.preface if sequence.scored_from is None else None
            stops_banned = sequence.stop if sampling.min_tokens or preface else ()
            banned = sorted(token for token in stops_banned if 0 <= token < self._model.vocab_size)
            slots.bias(slot, sequence.num_prompt + sampling.min_tokens, banned, sampling.logit_bias)
            # the end of a thought ends a call of several steps, because the constraint applies after it
            stops = (*([preface.end] if preface else ()), *sampling.stop)[: slots.stops.shape[1]]
            slots.stops[slot] = (*stops, *[-1] * (slots.stops.shape[1] - len(stops)))
        slots.tables[slot, num_pages : len(pages)] = pages[num_pages:]
        sequence.table_length, sequence.stale = len(pages), False
        return num_pages == 0


class HostPages:
    """Pages in host memory for conversations that were evicted from the cache. The first dimension is the page, then
    the layer and the other dimensions as in the cache, so that a page is contiguous.

    For a cache on a GPU the memory is pinned. Memory that was never written costs nothing.
    """

    def __init__(self, pages: ops.KvPages, num_pages: int) -> None:
        def room(tensor: torch.Tensor) -> torch.Tensor:
            shape = (num_pages, tensor.shape[0], *tensor.shape[2:])
            return torch.empty(shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda and num_pages > 0)

        self.tensors = [room(tensor) for tensor in pages.tensors]

    def put(self, pages: ops.KvPages, source: int, target: int) -> None:
        """Copy page `source` of the cache to page `target` of host memory."""
        for here, there in zip(self.tensors, pages.tensors, strict=True):
            here[target].copy_(there[:, source])

    def get(self, pages: ops.KvPages, source: int, target: int) -> None:
        """Copy page `source` of host memory to page `target` of the cache."""
        for here, there in zip(self.tensors, pages.tensors, strict=True):
            there[:, target] = here[source]


def _is_scored(chunk: Chunk) -> bool:
    first = chunk.sequence.scored_from
    return first is not None and chunk.begin + chunk.count > first
