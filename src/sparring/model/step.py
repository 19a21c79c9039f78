"""Steps of generation: new tokens in, sampled tokens out. Operation by operation, or as one call of the compiled
kernels.

Both give the same numbers to the bit; the one call has nothing between its operations, a better use for a second
thread, and takes several steps where sequences need nothing but what they sample. B sequences, N new rows, M sequences
that sample, P pages of a table, S slots.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from ctypes import addressof
from operator import is_
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from sparring.errors import refusal
from sparring.kernels import ops
from sparring.kernels.compiled.decoder_step import (
    BIASES,
    SLOT_COLUMNS,
    STOPS,
    TOPS,
    WEIGHTS,
    DecoderPlan,
    DeltaPlan,
    Form,
    LayerPlan,
    StepPlan,
)
from sparring.kernels.compiled.library import Weight
from sparring.kernels.kept import ids_of, no_masks
from sparring.model.attention import Paged
from sparring.model.causal import CausalModel
from sparring.model.decoder import Decoder, Layer, Mixture, Mlp
from sparring.model.layers import Product, RowLinear, RowNorm
from sparring.model.lora import Adapters
from sparring.model.recurrent import States

if TYPE_CHECKING:
    from sparring.model.device_step import DeviceStep

WORK_PER_THREAD = 2_000_000


class Slots(NamedTuple):
    """By slot, what a running request needs in every step; the caller changes them in place.

    tables [S, P] int32, temperature [S] float32, top_k [S] int64, top_p [S] and min_p [S] float32, seeds [S] uint64;
    stops [S, 8] int64: tokens behind which a sequence takes no further step, -1 for none. bias_values [S, 512] float32
    is added to the logits of the tokens bias_ids [S, 512] int32: bias_counts[s, 1] of them while sequence s has less
    than bias_until[s] tokens (int64), afterwards those from bias_counts[s, 0] on; int32. Where limited [S] uint8, only
    tokens with a bit in allowed [S, ceil(V / 64)] uint64 may come. tops [S] int32: how many of the likeliest tokens are
    wanted, at most 20. adapters [S] int32: the number of the sequence's adapter, -1 for none. states [S] int64: where a
    recurrent model keeps the state of its sequence.
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
        """Empty tables, temperature 1, no truncation, no stops, no bias."""
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
        """Tokens that are impossible until the sequence has `until` tokens, and what is added to logits; each token
        once in each, 512 in all."""
        count = len(banned) + len(added)
        self.bias_counts[slot], self.bias_until[slot] = (len(banned), count), until
        self.bias_ids[slot, :count] = [*banned, *(token for token, _ in added)]
        self.bias_values[slot, :count] = [*[-np.inf] * len(banned), *(value for _, value in added)]

    def limit(self, slot: int, allowed: bytes | None) -> None:
        """Tokens that alone may come: a bit each, lowest first; None for all."""
        self.limited[slot] = allowed is not None
        if allowed is not None:
            self.allowed[slot] = 0
            self.allowed.view(np.uint8)[slot, : len(allowed)] = np.frombuffer(allowed, np.uint8)

    def change(self, row: torch.Tensor, slot: int, length: int) -> None:
        """Bias and limit the logits [V] of a sequence of `length` tokens, in place."""
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
        """Whether any of these ("i") has an adapter."""
        return bool((self.adapters[np.frombuffer(slots, np.int32)] >= 0).any())

    def truncate(self, slots: array[int]) -> bool:
        """Whether any of these ("i") cuts off a part of its distribution."""
        at = np.frombuffer(slots, np.int32)
        truncated = (self.top_k[at] > 0).any() or (self.top_p[at] < 1).any() or (self.min_p[at] > 0).any()
        return bool(truncated or self.limited[at].any())


class StepRows(NamedTuple):
    """The new rows of one step, as `ops.PagedRows` has them, by slot. Plain arrays: filling these costs the least.

    slots "i" [B]; cu_rows "i" [B + 1]; lengths "i" [B] with the new rows; tokens "q" [N]; samples "B" [B]: 1 where the
    last row gives the next token. `independent`: no sequence reads keys that another one writes in this call. `steps`:
    how many steps may be taken, where sequences are independent, bring one row each and all sample; pages for them are
    there. All take fewer once one of them samples one of its stops, or another thread sets interrupt[0], "i" [1].
    """

    slots: array[int]
    cu_rows: array[int]
    lengths: array[int]
    tokens: array[int]
    samples: array[int]
    independent: bool
    steps: int
    interrupt: array[int]


Top = tuple[tuple[int, float], ...]
"""The likeliest tokens of one draw, best first (equal ones: lowest id first), each with its log-probability."""


class Sampled(NamedTuple):
    """Tokens and log-probabilities of each sequence that samples, [M] lists of at least one step. `kept`: the ids that
    each token was drawn from, empty where nothing was truncated (see `types.KeptSets`), or None where nothing was in
    any. `tops`: the likeliest tokens of each draw, none where they are not wanted, or None where nobody wants any."""

    tokens: list[list[int]]
    logprobs: list[list[float]]
    kept: list[list[bytes]] | None
    tops: list[list[Top]] | None


def _kept(masks: np.ndarray | None, bounds: Sequence[tuple[int, int]]) -> list[list[bytes]] | None:
    """The sets of each sequence, whose masks are rows `bounds` of masks [N, W]."""
    if masks is None:
        return None
    sets = ids_of(masks)
    return [sets[begin:end] for begin, end in bounds] if any(sets) else None


def _tops(ids: np.ndarray, logprobs: np.ndarray, bounds: Sequence[tuple[int, int]]) -> list[list[Top]]:
    """The likeliest tokens of each sequence, whose draws are rows `bounds` of ids and logprobs [N, 20]; -1 stands for
    none."""
    counts, ids, logprobs = (ids >= 0).sum(1).tolist(), ids.tolist(), logprobs.tolist()
    draws = [tuple(zip(ids[n][:count], logprobs[n][:count], strict=True)) for n, count in enumerate(counts)]
    return [draws[begin:end] for begin, end in bounds]


class OperationStep:
    """A step operation by operation: for every model, every numerics and every device."""

    most_steps = 1

    def __init__(self, model: CausalModel, pages: ops.KvPages, slots: Slots, states: States | None = None) -> None:
        self._model, self._pages, self._slots, self._states = model, pages, slots, states

    def __call__(self, rows: StepRows) -> Sampled:
        """Compute the rows, one step of them."""
        return self.sample(rows, self.hidden(rows))

    def hidden(self, rows: StepRows) -> torch.Tensor:
        """Compute the rows: their hidden states [N, D]."""
        cu_rows, ends = (torch.frombuffer(values, dtype=torch.int32) for values in rows[1:3])
        tokens = torch.frombuffer(rows.tokens, dtype=torch.int64)
        width = -(-max(rows.lengths) // self._pages.page_size)
        tables = torch.from_numpy(self._slots.tables[rows.slots, :width])
        counts = cu_rows.diff()
        positions = torch.arange(len(tokens)) + torch.repeat_interleave(ends - cu_rows[1:], counts)
        kept = (
            None
            if self._states is None
            else (self._states, self._there(torch.from_numpy(self._slots.states[rows.slots])))
        )
        tokens, positions, *where = (self._there(t) for t in (tokens, positions, tables, cu_rows, ends))
        paged = Paged(self._pages, ops.PagedRows(*where, int(counts.max())), kept)
        adapters = self._slots.adapters[rows.slots]
        with self._model.adapters.of_rows(np.repeat(adapters, np.diff(rows.cu_rows))):
            return self._model.hidden(tokens, positions, paged)

    def _there(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same where the model computes: what a step is made of is small and lies with the CPU."""
        return tensor.to(self._model.device)

    def sample(self, rows: StepRows, hidden: torch.Tensor) -> Sampled:
        """The next token of each sequence that samples, from hidden[N, D]."""
        if 1 not in rows.samples:
            return Sampled([], [], None, None)
        slots, cu_rows, ends = (torch.frombuffer(values, dtype=torch.int32) for values in rows[:3])
        sampling = torch.frombuffer(rows.samples, dtype=torch.bool)
        chosen = slots[sampling].numpy()
        logits = self._model.logits(hidden.index_select(0, self._there(cu_rows[1:][sampling] - 1)))
        if (self._slots.bias_counts[chosen] > 0).any() or self._slots.limited[chosen].any():
            for row, slot, length in zip(logits, chosen.tolist(), ends[sampling].tolist(), strict=True):
                self._slots.change(row, slot, length)
        slots = self._slots
        drawn_by = (slots.temperature, slots.top_k, slots.top_p, slots.min_p, slots.seeds.view(np.int64))
        requests = [torch.from_numpy(column[chosen]) for column in drawn_by]
        requests += [ends[sampling], torch.from_numpy(slots.limited[chosen])]
        sampled, logprobs, masks = ops.sample(logits, *map(self._there, requests))
        kept = _kept(masks, [(i, i + 1) for i in range(len(sampled))])
        tops = self._tops(logits, chosen, kept) if self._slots.tops[chosen].any() else None
        return Sampled(sampled.unsqueeze(1).tolist(), logprobs.unsqueeze(1).tolist(), kept, tops)

    def _tops(self, logits: torch.Tensor, chosen: np.ndarray, kept: list[list[bytes]] | None) -> list[list[Top]]:
        """The likeliest tokens of logits [M, V], of slots [M], each row limited to its kept ids."""
        found: list[list[Top]] = []
        for n, slot in enumerate(chosen.tolist()):
            ids = np.frombuffer(bytearray(kept[n][0] if kept else b""), np.int32)
            wide = logits[n, ids] if len(ids) else logits[n]
            order = wide.sort(descending=True, stable=True).indices[: self._slots.tops[slot]]
            best = self._there(torch.from_numpy(ids))[order].long() if len(ids) else order
            sets = (
                (len(ids) * torch.arange(len(best) + 1), torch.from_numpy(np.tile(ids, len(best))))
                if len(ids)
                else None
            )
            sets = None if sets is None else (self._there(sets[0]), self._there(sets[1]))
            heat = torch.full((len(best),), float(self._slots.temperature[slot]), device=logits.device)
            logprobs, _ = ops.token_logprobs(logits[n].expand(len(best), -1), best, heat, sets)
            found.append([tuple(zip(best.tolist(), logprobs.tolist(), strict=True))])
        return found


class DecoderStep:
    """Steps as one call, for a `Decoder` on the compiled kernels. Follows every change of the weights and of the
    adapters.

    A thread takes part for every `work_per_thread` multiplications, because waking one for fewer costs more than the
    work.
    """

    most_steps = 16

    def __init__(
        self, model: CausalModel, pages: ops.KvPages, slots: Slots, *, work_per_thread: int = WORK_PER_THREAD
    ) -> None:
        decoder, head = model.decoder, model.head.product
        self._deltas = Deltas(model.adapters, decoder)
        self._decoder, self._head, self._pages, self._slots = decoder, head, pages, slots
        self._work_per_thread = work_per_thread
        self._tensors: list[torch.Tensor | None] = []
        self._mlp_width = max(_mlp_widths(decoder), default=0)
        self._norms = [decoder.norm, *(norm for layer in decoder.layers for norm in layer.norms)]
        self._products = [head, *(product for layer in decoder.layers for product in layer.products)]
        self._products += [mixture.router.product for mixture in decoder.mixtures]
        self._stacks = [
            (mixture.router.top_k, stack) for mixture in decoder.mixtures for stack in mixture.experts.stacks
        ]
        self._work_per_sample, *per_row = (p.packed.num_outputs * p.packed.num_inputs for p in self._products)
        self._work_per_row = sum(per_row) + sum(count * one.num_outputs * one.num_inputs for count, one in self._stacks)

    def __call__(self, rows: StepRows) -> Sampled:
        """Compute the rows; lengths and tokens of `rows` move on where more than one step is taken.

        Raises:
            BadInput: a table is too short or names no page, or a token or position is out of range; nothing was
                computed.
        """
        self._follow()
        slots, cu_rows, lengths, tokens, samples, independent, steps, interrupt = rows
        count = samples.count(1)
        sampled, logprobs = array("q", bytes(8 * count * steps)), array("f", bytes(4 * count * steps))
        counts = array("i", bytes(4 * count))
        masks = no_masks(count * steps, self._plan.V) if self._slots.truncate(slots) else None
        inputs = [values.buffer_info()[0] for values in (slots, cu_rows, lengths, tokens, samples)]
        outputs = [values.buffer_info()[0] for values in (interrupt, sampled, logprobs, counts)]
        tops = None
        if self._slots.tops[np.frombuffer(slots, np.int32)].any():
            tops = np.full((count * steps, TOPS), -1, np.int32), np.zeros((count * steps, TOPS), np.float32)
        outputs += [None if values is None else values.ctypes.data for values in (*(tops or (None, None)), masks)]
        work = steps * (len(tokens) * self._work_per_row + count * self._work_per_sample)
        threads = max(1, min(torch.get_num_threads(), work // self._work_per_thread))
        deltas = self._deltas.now() if self._slots.adapted(slots) else None
        step = StepPlan(*inputs, len(slots), independent, steps, *outputs, threads, deltas)
        bad = ops.decoder_step(self._plan, step, self._pages.dtype)
        if bad != -1:
            self._refuse(bad, rows)
        bounds = [(i * steps, i * steps + taken) for i, taken in enumerate(counts)]
        tokens, their = ([values[a:b].tolist() for a, b in bounds] for values in (sampled, logprobs))
        return Sampled(tokens, their, _kept(masks, bounds), None if tops is None else _tops(*tops, bounds))

    def _follow(self) -> None:
        """Point at the tensors that the model has now. Packing in place keeps them; a replaced parameter does not."""
        tensors = [self._decoder.embedding.weight, *(norm.weight for norm in self._norms)]
        tensors += [product.packed.storage for product in self._products]
        tensors += [product.bias for product in self._products]
        tensors += [stack.storage for _, stack in self._stacks]
        if len(tensors) == len(self._tensors) and all(map(is_, tensors, self._tensors)):
            return
        self._check()
        self._plan = self._point()
        self._tensors = tensors

    def _check(self) -> None:
        """Raises BadInput where a norm's weight does not fit its rows: C would read past its end."""
        width, dtype = self._decoder.embedding.weight.shape[1], self._pages.dtype
        first = self._decoder.layers[0]
        heads = [norm for layer in self._decoder.layers for norm in (layer.q_norm, layer.k_norm)]
        for norm in self._norms:
            size = first.head_dim if norm in heads else width
            if norm.weight.shape != (size,) or norm.weight.dtype is not dtype:
                got = f"{tuple(norm.weight.shape)} {norm.weight.dtype}"
                raise refusal("decoder step", f"a norm weight [{size}] {dtype}", got, "load the weights again")

    def _point(self) -> DecoderPlan:
        decoder, pages, slots = self._decoder, self._pages, self._slots
        layers = decoder.layers
        self._layers = (LayerPlan * len(layers))(
            *(self._layer(layer, *at) for layer, at in zip(layers, pages.layers.values(), strict=True))
        )
        self._rotary = [table.to(pages.dtype).contiguous() for table in (decoder.rotary.cos, decoder.rotary.sin)]
        vocabulary, width = decoder.embedding.weight.shape
        sizes = [(mixture.router.out_features, mixture.router.top_k) for mixture in decoder.mixtures]
        return DecoderPlan(
            addressof(self._layers),
            _weight(self._head),
            *(tensor.data_ptr() for tensor in (decoder.embedding.weight, decoder.norm.weight, *self._rotary)),
            len(layers),
            width,
            *layers[0].heads,
            layers[0].head_dim,
            vocabulary,
            len(decoder.rotary.cos),
            self._mlp_width,
            *(max(size) for size in zip(*sizes, strict=True)) if sizes else (0, 0),
            pages.page_size,
            pages.num_pages,
            slots.tables.shape[1],
            *(getattr(slots, name).ctypes.data for name in SLOT_COLUMNS),
            decoder.norm.variance_epsilon,
        )

    @staticmethod
    def _layer(layer: Layer, keys: torch.Tensor, values: torch.Tensor) -> LayerPlan:
        norms: tuple[RowNorm | None, ...] = (layer.input_norm, layer.q_norm, layer.k_norm, layer.mlp_norm)
        weights, chosen = [_weight(product) for product in layer.products], (0, 0)
        if isinstance(layer.mlp, Mixture):
            router = layer.mlp.router
            weights += [
                *(Weight.on(ops.path_name(), stack, None) for stack in layer.mlp.experts.stacks),
                _weight(router.product),
            ]
            chosen = (router.top_k, router.renormalise)
        else:
            weights.append(Weight())
        return LayerPlan(
            *weights,
            *(None if norm is None else norm.weight.data_ptr() for norm in norms),
            keys.data_ptr(),
            values.data_ptr(),
            *(0.0 if norm is None else norm.variance_epsilon for norm in norms),
            Form.of(layer.form),
            *chosen,
        )

    def _refuse(self, bad: int, rows: StepRows) -> None:
        if bad >= 0:
            table = self._slots.tables[rows.slots[bad]].tolist()
            got = f"{table} for {rows.lengths[bad]} tokens"
            expected = f"a table over {self._pages.num_pages} pages of {self._pages.page_size} that holds its context"
            raise refusal(f"decoder step: sequence {bad}", expected, got, "allocate pages before the call")
        row, (vocabulary, _) = -2 - bad, self._decoder.embedding.weight.shape
        expected = f"a token below {vocabulary} at a position below {len(self._decoder.rotary.cos)}"
        raise refusal(f"decoder step: row {row}", expected, f"token {rows.tokens[row]}", "check the request")


def _weight(product: Product) -> Weight:
    return Weight.on(ops.path_name(), product.packed, product.bias)


class Deltas:
    """The adapters of a model as the compiled steps read them; made anew when they have changed."""

    def __init__(self, adapters: Adapters, decoder: Decoder) -> None:
        self._adapters, self._layers = adapters, decoder.layers
        self._known = 0
        self._now: Any = None

    def now(self) -> int:
        """The address of the plans, by number, layer and product."""
        if self._known != self._adapters.num_changes:
            self._now = self._made()
            self._known = self._adapters.num_changes
        return addressof(self._now)

    def _made(self) -> Any:
        placed, count = self._adapters.placed, WEIGHTS * len(self._layers)
        plans = (DeltaPlan * (count * (max(placed, default=-1) + 1)))()
        for number, adapter in placed.items():
            for index, layer in enumerate(self._layers):
                for place, site in enumerate(_sites(layer)):
                    delta = adapter.deltas.get(site)
                    if delta is not None:
                        factors = (Weight.on(ops.path_name(), factor, None) for factor in (delta.a, delta.b))
                        plans[number * count + index * WEIGHTS + place] = DeltaPlan(*factors, delta.scale)
        return plans


def _sites(layer: Layer) -> list[Any]:
    """Where adapters add to the products of a layer, in the order of `DeltaPlan`s."""
    sites = [product.adapted for product in layer.products]
    return [*sites, *layer.mlp.experts.adapted.sites] if isinstance(layer.mlp, Mixture) else sites


def _mlp_widths(decoder: Decoder) -> set[int]:
    """Of the layers that have one MLP for all rows."""
    return {layer.mlp.down.packed.num_inputs for layer in decoder.layers if isinstance(layer.mlp, Mlp)}


def step_of(
    model: CausalModel, pages: ops.KvPages, slots: Slots, states: States | None = None
) -> DecoderStep | DeviceStep | OperationStep:
    """The one call where the model is of the Llama family and the compiled kernels are in use; graphs of it on a
    GPU."""
    operations = OperationStep(model, pages, slots, states)
    if model.decoder is None or not isinstance(model.head, RowLinear):
        return operations
    if ops.path_name(model.device) == "exact-device":
        if model.decoder.mixtures:
            return operations  # a graph holds no product whose rows are counted first
        from sparring.model.device_step import DeviceStep

        return DeviceStep(model, pages, slots, operations)
    one_call = len(_mlp_widths(model.decoder)) <= 1 and all(
        mixture.experts.is_plain for mixture in model.decoder.mixtures
    )
    return DecoderStep(model, pages, slots) if ops.is_compiled(model.device) and one_call else operations
