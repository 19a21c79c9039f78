"""From the chunks of a step to sampled tokens: the tensors, the forward and the sampler.

Shapes: B sequences, N new tokens, P pages per sequence, M sequences that sample, D width.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Rows
from itertools import accumulate
from operator import add

import torch

from sparring.engine.scheduler import Chunk
from sparring.engine.sequence import Sequence
from sparring.model.attention import Packed
from sparring.model.causal import CausalModel
from sparring.model.head import judge
from sparring.model.kernels import ops
from sparring.model.step import OperationStep, Sampled, Slots, StepRows, step_of

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
            device=model.device,
            transposed=ops.transposes_keys(model.device),
        )
        longest = min(num_pages, -(-model.max_positions // page_size))
        self._slots = Slots.of(max_running, longest, model.vocab_size)
        self._compute = step_of(model, self._pages, self._slots)
        self._operations = OperationStep(model, self._pages, self._slots)
        self._interrupt = array("i", [0])

    @property
    def most_steps(self) -> int:
        """How many steps one call can take."""
        return self._compute.most_steps

    def step(self, chunks: list[Chunk], steps: int) -> Sampled:
        """Compute the chunks; sample for those that say so, in their order, and go on for up to `steps` steps in all. What is
        scored on the way goes to its sequences."""
        rows = self._rows(chunks, steps)
        if 0 not in rows.samples or not any(map(_is_scored, chunks)):
            return self._compute(rows)
        hidden = self._operations.hidden(rows)
        for chunk, begin in zip(chunks, rows.cu_rows, strict=False):
            if _is_scored(chunk):
                self._score(chunk, hidden[begin : begin + chunk.count])
        return self._operations.sample(rows, hidden)

    def copy(self, pages: list[tuple[int, int]]) -> None:
        """Copy pages, (from, to) in this order."""
        for source, target in pages:
            self._pages.copy_page(source, target)

    def interrupt(self, wanted: bool) -> None:
        """From any thread: a step that is being computed, and any after it, is the last of its call; or no longer."""
        self._interrupt[0] = wanted

    def probe(self, tokens: Rows[int]) -> list[float]:
        """Log-probabilities of tokens[1:] under the weights as they are now, without touching the cache."""
        device = self._model.device
        row, targets = (torch.tensor(part, device=device) for part in (tokens[:-1], tokens[1:]))
        hidden = self._model.hidden(row, torch.arange(len(row), device=device), Packed.of([len(row)]).to(device))
        return judge(self._model, hidden, targets, torch.ones(len(row), device=device)).logprob.tolist()

    def _score(self, chunk: Chunk, hidden: torch.Tensor) -> None:
        """From hidden[count, D] of a chunk to the scores of those of its rows that its sequence wants."""
        sequence, begin, count, _ = chunk
        first = max(begin, sequence.scored_from)
        request = sequence.request
        targets = torch.tensor(request.tokens[first + 1 : begin + count + 1], device=hidden.device)
        heat = torch.full((len(targets),), request.temperature, device=hidden.device)
        judged = judge(self._model, hidden[first - begin :], targets, heat, request.top_k)
        sequence.scores.append(tuple(values.tolist() for values in judged))

    def _rows(self, chunks: list[Chunk], steps: int) -> StepRows:
        sequences, begins, counts, samples = zip(*chunks, strict=True)
        admitted = [self._note(sequence) for sequence in sequences if sequence.stale].count(True)
        for sequence in sequences:
            if sequence.allowed is not None:
                self._slots.limit(sequence.slot, sequence.allowed)
        if all(count == 1 for count in counts):
            cu_rows = range(len(chunks) + 1)
            tokens = [sequence.tokens[begin] for sequence, begin in zip(sequences, begins, strict=True)]
        else:
            cu_rows = accumulate(counts, initial=0)
            tokens = [token for sequence, begin, count, _ in chunks for token in sequence.tokens[begin : begin + count]]
        # a page that another sequence fills in this step is only found by one that is admitted in it
        independent = len(tokens) == len(chunks) and not admitted
        return StepRows(
            slots=array("i", [sequence.slot for sequence in sequences]),
            cu_rows=array("i", cu_rows),
            lengths=array("i", map(add, begins, counts)),
            tokens=array("q", tokens),
            samples=array("B", samples),
            independent=independent,
            steps=steps if independent else 1,
            interrupt=self._interrupt,
        )

    def _note(self, sequence: Sequence) -> bool:
        """Bring a sequence's slot up to date; pages are only ever appended while it runs. Whether it is new there."""
        known, pages = sequence.table_length, sequence.pages
        slots, slot = self._slots, sequence.slot
        if known == 0:
            sampling = sequence.sampling
            slots.temperature[slot], slots.min_p[slot] = sampling.temperature, sampling.min_p
            slots.top_k[slot], slots.top_p[slot] = sampling.top_k, sampling.top_p
            slots.seeds[slot] = sampling.seed & MASK_64
            slots.tops[slot] = sampling.top_logprobs
            slots.limit(slot, None)
            banned = sequence.stop if sampling.min_tokens else ()
            banned = sorted(token for token in banned if 0 <= token < self._model.vocab_size)
            slots.bias(slot, sequence.num_prompt + sampling.min_tokens, banned, sampling.logit_bias)
            stops = sampling.stop[: slots.stops.shape[1]]
            slots.stops[slot] = (*stops, *[-1] * (slots.stops.shape[1] - len(stops)))
        slots.tables[slot, known : len(pages)] = pages[known:]
        sequence.table_length, sequence.stale = len(pages), False
        return known == 0


def _is_scored(chunk: Chunk) -> bool:
    first = chunk.sequence.scored_from
    return first is not None and chunk.begin + chunk.count > first
