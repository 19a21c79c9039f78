"""Steps of generation as one call of the compiled kernels, for the Llama family.

One call has no Python between its operations, uses a second thread better, and runs several steps if the sequences only
sample. Shapes: B sequences, N new rows, M sequences that sample.
"""

from __future__ import annotations

from array import array
from ctypes import addressof
from operator import is_
from typing import Any

import numpy as np
import torch

from sparring.errors import refusal
from sparring.kernels import ops
from sparring.kernels.compiled.decoder_step import (
    SLOT_COLUMNS,
    TOPS,
    WEIGHTS,
    AttentionPlan,
    DecoderPlan,
    DeltaPlan,
    LayerPlan,
    StepPlan,
)
from sparring.kernels.compiled.library import Weight
from sparring.kernels.truncation import no_masks
from sparring.model.causal import CausalModel
from sparring.model.decoder import Layer, LlamaDecoder, Mixture, Mlp
from sparring.model.layers import Product, RowLinear, RowNorm
from sparring.model.lora import Adapters
from sparring.model.steps.rows import SampledTokens, Slots, StepRows, kept_sets, likeliest

WORK_PER_THREAD = 2_000_000


class DecoderStep:
    """Steps as one call, for a `LlamaDecoder` on the compiled kernels. It detects every change of the weights and of
    the adapters.

    One thread is used per `work_per_thread` multiplications: waking a thread for fewer costs more than it saves.
    """

    most_steps = 16

    def __init__(
        self, model: CausalModel, pages: ops.KvPages, slots: Slots, *, work_per_thread: int = WORK_PER_THREAD
    ) -> None:
        decoder, linear = model.decoder, model.head
        assert decoder is not None and isinstance(linear, RowLinear)  # as `step_of` chooses
        head = linear.product
        self._adapter_plans = AdapterPlans(model.adapters, decoder)
        self._decoder, self._head, self._pages, self._slots = decoder, head, pages, slots
        self._work_per_thread = work_per_thread
        self._tensors: list[torch.Tensor | None] = []
        self._mlp_width = max(mlp_widths(decoder), default=0)
        self._norms = [decoder.norm, *(norm for layer in decoder.layers for norm in layer.norms)]
        self._products = [head, *(product for layer in decoder.layers for product in layer.products)]
        self._products += [mixture.router.product for mixture in decoder.mixtures]
        self._stacks = [
            (mixture.router.top_k, stack) for mixture in decoder.mixtures for stack in mixture.experts.stacks
        ]
        self._work_per_sample, *per_row = (p.packed.num_outputs * p.packed.num_inputs for p in self._products)
        self._work_per_row = sum(per_row) + sum(count * one.num_outputs * one.num_inputs for count, one in self._stacks)

    def __call__(self, rows: StepRows) -> SampledTokens:
        """Compute the rows. If several steps are run, lengths and tokens of `rows` are advanced.

        Raises:
            BadInput: a page table is too short or names no page, or a token or position is out of range; nothing was
                computed.
        """
        self._follow()
        slots, cu_rows, lengths, tokens, samples, _, steps, interrupt = rows
        count = samples.count(1)
        sampled, logprobs = array("q", bytes(8 * count * steps)), array("f", bytes(4 * count * steps))
        counts = array("i", bytes(4 * count))
        masks = no_masks(count * steps, self._plan.V) if self._slots.truncated(slots).any() else None
        inputs = [values.buffer_info()[0] for values in (slots, cu_rows, lengths, tokens, samples)]
        outputs: list[int | None] = [values.buffer_info()[0] for values in (interrupt, sampled, logprobs, counts)]
        tops = None
        if self._slots.tops[np.frombuffer(slots, np.int32)].any():
            tops = np.full((count * steps, TOPS), -1, np.int32), np.zeros((count * steps, TOPS), np.float32)
        outputs += [None if values is None else values.ctypes.data for values in (*(tops or (None, None)), masks)]
        work = steps * (len(tokens) * self._work_per_row + count * self._work_per_sample)
        threads = max(1, min(torch.get_num_threads(), work // self._work_per_thread))
        deltas = self._adapter_plans.address() if self._slots.adapted(slots) else None
        step = StepPlan(*inputs, len(slots), rows.independent, steps, *outputs, threads, deltas)
        bad = ops.decoder_step(self._plan, step, self._pages.dtype)
        if bad != -1:
            self._refuse(bad, rows)
        bounds = [(i * steps, i * steps + taken) for i, taken in enumerate(counts)]
        drawn, their = [sampled[a:b].tolist() for a, b in bounds], [logprobs[a:b].tolist() for a, b in bounds]
        return SampledTokens(drawn, their, kept_sets(masks, bounds), None if tops is None else likeliest(*tops, bounds))

    def _follow(self) -> None:
        """Update the plan if a tensor of the model was replaced. Packing in place keeps tensors."""
        tensors: list[torch.Tensor | None] = [self._decoder.embedding.weight, *(norm.weight for norm in self._norms)]
        tensors += [product.packed.storage for product in self._products]
        tensors += [product.bias for product in self._products]
        tensors += [stack.storage for _, stack in self._stacks]
        if len(tensors) == len(self._tensors) and all(map(is_, tensors, self._tensors)):
            return
        self._check()
        self._plan = self._point()
        self._tensors = tensors

    def _check(self) -> None:
        """Check the shapes of norm weights, since C would read past their end. Raises BadInput if a weight does not fit
        its rows."""
        width, dtype = self._decoder.embedding.weight.shape[1], self._pages.dtype
        first = self._decoder.layers[0]
        heads = [norm for layer in self._decoder.layers for norm in (layer.q_norm, layer.k_norm)]
        for norm in self._norms:
            size = first.head_dim if norm in heads else width
            if norm.weight.shape != (size,) or norm.weight.dtype is not dtype:
                given = f"{tuple(norm.weight.shape)} {norm.weight.dtype}"
                raise refusal("decoder step", f"a norm weight [{size}] {dtype}", given, "load the weights again")

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
            AttentionPlan.of(layer.form),
            *chosen,
        )

    def _refuse(self, bad: int, rows: StepRows) -> None:
        if bad >= 0:
            table = self._slots.tables[rows.slots[bad]].tolist()
            given = f"{table} for {rows.lengths[bad]} tokens"
            expected = f"a table over {self._pages.num_pages} pages of {self._pages.page_size} that holds its context"
            raise refusal(f"decoder step: sequence {bad}", expected, given, "allocate pages before the call")
        row, (vocabulary, _) = -2 - bad, self._decoder.embedding.weight.shape
        expected = f"a token below {vocabulary} at a position below {len(self._decoder.rotary.cos)}"
        raise refusal(f"decoder step: row {row}", expected, f"token {rows.tokens[row]}", "check the request")


def _weight(product: Product) -> Weight:
    return Weight.on(ops.path_name(), product.packed, product.bias)


class AdapterPlans:
    """Adapters of a model in the form that the compiled steps read; rebuilt when the adapters change."""

    def __init__(self, adapters: Adapters, decoder: LlamaDecoder) -> None:
        self._adapters, self._layers = adapters, decoder.layers
        self._seen_changes = 0
        self._plans: Any = None

    def address(self) -> int:
        """Return the address of the plans, ordered by adapter number, layer and product."""
        if self._seen_changes != self._adapters.num_changes:
            self._plans = self._build()
            self._seen_changes = self._adapters.num_changes
        return addressof(self._plans)

    def _build(self) -> Any:
        by_number, count = self._adapters.by_number, WEIGHTS * len(self._layers)
        plans = (DeltaPlan * (count * (max(by_number, default=-1) + 1)))()
        for number, adapter in by_number.items():
            for index, layer in enumerate(self._layers):
                for place, target in enumerate(_targets_of(layer)):
                    delta = adapter.terms.get(target)
                    if delta is not None:
                        assert delta.a is not None and delta.b is not None  # packed, as all of a decoder's
                        factors = (Weight.on(ops.path_name(), factor, None) for factor in (delta.a, delta.b))
                        plans[number * count + index * WEIGHTS + place] = DeltaPlan(*factors, delta.scale)
        return plans


def _targets_of(layer: Layer) -> list[Any]:
    """Return the adapter targets of the products of a layer, in the order of `DeltaPlan`s."""
    targets: list[Any] = [product.adapted for product in layer.products]
    adapted = layer.mlp.experts.adapted if isinstance(layer.mlp, Mixture) else None
    return targets if adapted is None else [*targets, *adapted.targets]


def mlp_widths(decoder: LlamaDecoder) -> set[int]:
    """Return the widths of the dense MLPs."""
    return {layer.mlp.down.packed.num_inputs for layer in decoder.layers if isinstance(layer.mlp, Mlp)}
