"""One step of generation as one call of the compiled kernels: new tokens in, sampled tokens out.

The same numbers as `CausalModel.hidden`, `logits` and `ops.sample` one after the other, without what lies between them.
B sequences, N new rows, M sequences that sample, P pages of a table, S slots.
"""

from __future__ import annotations

from ctypes import addressof, byref
from operator import is_
from typing import NamedTuple

import numpy as np
import torch

from sparring.errors import refusal
from sparring.model.decoder import Decoder, Layer
from sparring.model.kernels import ops
from sparring.model.kernels.decoder_step import DecoderPlan, LayerPlan, StepPlan, Weight
from sparring.model.layers import Product, RowNorm


class Slots(NamedTuple):
    """By slot, what a running request needs in every step; the caller changes them in place.

    tables [S, P] int32, temperature [S] float32, top_k [S] int64, top_p [S] float32, seeds [S] uint64.
    """

    tables: np.ndarray
    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    seeds: np.ndarray

    @staticmethod
    def of(num_slots: int, pages_per_table: int) -> Slots:
        """Empty tables, temperature 1, no truncation."""
        return Slots(
            np.zeros((num_slots, pages_per_table), np.int32),
            np.ones(num_slots, np.float32),
            np.zeros(num_slots, np.int64),
            np.ones(num_slots, np.float32),
            np.zeros(num_slots, np.uint64),
        )


class StepRows(NamedTuple):
    """The new rows of one step, as `ops.PagedRows` has them, by slot.

    slots [B] int32; cu_rows [B + 1] int32; lengths [B] int32 with the new rows; tokens [N] int64; samples [B] bool: its last
    row gives the next token. `independent`: no sequence reads keys that another one writes in this step.
    """

    slots: np.ndarray
    cu_rows: np.ndarray
    lengths: np.ndarray
    tokens: np.ndarray
    samples: np.ndarray
    independent: bool


class DecoderStep:
    """A `Decoder`, its head, pages and slots, ready to be called. Follows every change of the weights."""

    def __init__(self, decoder: Decoder, head: Product, pages: ops.KvPages, slots: Slots) -> None:
        self._decoder, self._head, self._pages, self._slots = decoder, head, pages, slots
        self._tensors: list[torch.Tensor | None] = []

    def __call__(self, rows: StepRows) -> tuple[np.ndarray, np.ndarray]:
        """Compute the rows; tokens [M] int64 and log-probabilities [M] float32 of those that sample.

        Raises:
            BadInput: a table is too short or names no page, or a token or position is out of range; nothing was computed.
        """
        self._follow()
        count = len(rows.slots)
        sampled, logprobs = np.empty(count, np.int64), np.empty(count, np.float32)
        arrays = (rows.slots, rows.cu_rows, rows.lengths, rows.tokens, rows.samples)
        step = StepPlan(
            *(array.ctypes.data for array in arrays),
            count,
            rows.independent,
            sampled.ctypes.data,
            logprobs.ctypes.data,
            torch.get_num_threads(),
        )
        bad = ops.decoder_step(byref(self._plan), byref(step), self._pages.dtype)
        if bad != -1:
            self._refuse(bad, rows)
        sampling = int(np.count_nonzero(rows.samples))
        return sampled[:sampling], logprobs[:sampling]

    def _follow(self) -> None:
        """Point at the tensors that the model has now. Packing in place keeps them; a replaced parameter does not."""
        decoder = self._decoder
        tensors = [decoder.embedding.weight, decoder.norm.weight, self._head.packed.storage, self._head.bias]
        for layer in decoder.layers:
            tensors += [norm.weight for norm in layer.norms]
            for product in layer.products:
                tensors += (product.packed.storage, product.bias)
        if len(tensors) == len(self._tensors) and all(map(is_, tensors, self._tensors)):
            return
        self._check()
        self._plan = self._point()
        self._tensors = tensors

    def _check(self) -> None:
        """Raises BadInput where a norm's weight does not fit its rows: C would read past its end."""
        decoder = self._decoder
        width = decoder.embedding.weight.shape[1]
        sizes = [(decoder.norm, width)]
        for layer in decoder.layers:
            sizes += [(norm, width if norm in (layer.input_norm, layer.mlp_norm) else layer.head_dim) for norm in layer.norms]
        for norm, size in sizes:
            if norm.weight.shape != (size,) or norm.weight.dtype is not self._pages.dtype:
                got = f"{tuple(norm.weight.shape)} {norm.weight.dtype}"
                raise refusal("decoder step", f"a norm weight [{size}] {self._pages.dtype}", got, "load the weights again")

    def _point(self) -> DecoderPlan:
        decoder, pages, slots = self._decoder, self._pages, self._slots
        layers = decoder.layers
        self._layers = (LayerPlan * len(layers))(
            *(self._layer(layer, *at) for layer, at in zip(layers, pages.layers, strict=True))
        )
        self._rotary = [table.to(pages.dtype).contiguous() for table in (decoder.rotary.cos, decoder.rotary.sin)]
        vocabulary, width = decoder.embedding.weight.shape
        return DecoderPlan(
            addressof(self._layers),
            Weight.of(self._head.packed, self._head.bias),
            *(tensor.data_ptr() for tensor in (decoder.embedding.weight, decoder.norm.weight, *self._rotary)),
            len(layers),
            width,
            layers[0].qkv.sizes[0] // pages.head_dim,
            pages.num_kv_heads,
            pages.head_dim,
            layers[0].down.packed.num_inputs,
            vocabulary,
            len(decoder.rotary.cos),
            pages.page_size,
            pages.num_pages,
            slots.tables.shape[1],
            *(array.ctypes.data for array in (slots.tables, slots.temperature, slots.top_p, slots.top_k, slots.seeds)),
            decoder.norm.variance_epsilon,
        )

    @staticmethod
    def _layer(layer: Layer, keys: torch.Tensor, values: torch.Tensor) -> LayerPlan:
        norms: tuple[RowNorm | None, ...] = (layer.input_norm, layer.q_norm, layer.k_norm, layer.mlp_norm)
        return LayerPlan(
            *(Weight.of(product.packed, product.bias) for product in layer.products),
            *(None if norm is None else norm.weight.data_ptr() for norm in norms),
            keys.data_ptr(),
            values.data_ptr(),
            *(0.0 if norm is None else norm.variance_epsilon for norm in norms),
            layer.scale,
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

