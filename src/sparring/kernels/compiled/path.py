"""Compiled kernels as functions on torch tensors, without gradients: `ops` adds those.

Every function takes contiguous CPU tensors of float32 or bfloat16 and allocates its result. N rows or tokens, D width,
K inputs, M outputs, H query heads, G key/value heads, d head size (a multiple of 16), B sequences, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Structure, byref, c_int
from typing import Any

import numpy as np
import torch

from sparring.kernels.attention_scores import AttentionForm
from sparring.kernels.compiled.library import PAIRS_NAME, TILES_NAME, Experts, Library, Weight
from sparring.kernels.memory import zeros
from sparring.kernels.pages import PagedRows
from sparring.kernels.path import Angles, Heads, Norms, PackedMatrix, SamplingRows, SavedAttention, SavedLogprobs
from sparring.kernels.truncation import KeptRows

PANEL = 64
PLANES = 3
ROWS_PER_PARTIAL = 64
TILE_DEPTH = 32
PLAIN = {int, float, bool, type(None), type(byref(c_int()))}
"""Types of arguments that a compiled function takes as they are; others are tensors."""


class CompiledPath:
    """Operations of one compiled library, with matrix products on AMX tiles, by pairs of bfloat16, or portable.
    Implements `KernelPath`. Implements `FusedPath`."""

    is_compiled = True
    transposes_keys = True

    def __init__(self, library: Library, name: str) -> None:
        self._f, self._t = library.functions, library.typed
        self.name = name
        self._tiles, self._pairs = name == TILES_NAME, name == PAIRS_NAME

    def pack(self, weights: Sequence[torch.Tensor], storage: torch.Tensor | None) -> torch.Tensor:
        """Write weights[M_i, K], joined to [M, K], in panels of 64 columns, into `storage` if given.

        Layouts: [ceil(M / 64), K, 64] of the weight's dtype; pairs of bfloat16 [ceil(M / 64), ceil(K / 2), 64, 2]; on
        tiles [ceil(M / 64), 2, ceil(K / 32), P, 16, 32, 2] bfloat16, with P planes: three for a float32 weight, one for
        bfloat16.
        """
        parts = [weight.detach() for weight in weights]
        if any(len(part) % PANEL for part in parts[:-1]):
            parts = [torch.cat(parts)]
        depth, dtype, threads = parts[0].shape[1], parts[0].dtype, torch.get_num_threads()
        kind, _ = self._layout(depth, dtype)
        if storage is None:
            storage = zeros(*self.packed_layout([len(part) for part in parts], depth, dtype))
        begin = 0
        for part in parts:
            rows = part.contiguous()
            self._f[kind](rows.data_ptr(), storage[begin:].data_ptr(), len(rows), depth, threads)
            begin += len(rows) // PANEL
        return storage

    def packed_layout(
        self, counts: Sequence[int], depth: int, dtype: torch.dtype
    ) -> tuple[tuple[int, ...], torch.dtype]:
        kind, panel = self._layout(depth, dtype)
        return (-(-sum(counts) // PANEL), *panel), torch.float32 if kind == "pack_f32" else torch.bfloat16

    def _layout(self, depth: int, dtype: torch.dtype) -> tuple[str, tuple[int, ...]]:
        """Return the name of the packing function for [M, depth], and the shape of a panel."""
        narrow = dtype is torch.bfloat16
        if self._tiles:
            return ("pack_bf16", _tile_panel(depth, 1)) if narrow else ("pack_split", _tile_panel(depth, PLANES))
        if self._pairs and narrow:
            return "pack_pairs", (-(-depth // 2), PANEL, 2)
        return "pack_panels_bf16" if narrow else "pack_f32", (depth, PANEL)

    def linear(
        self, x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, num_outputs: int, dtype: torch.dtype
    ) -> torch.Tensor:
        if bias is not None:
            bias = bias.detach().float()
        sizes = (x.shape[0], num_outputs, x.shape[1])
        if x.dtype is torch.bfloat16 and (self._tiles or self._pairs):
            y = torch.empty((x.shape[0], num_outputs), dtype=dtype)
            function = self._f["linear_bf16" if self._tiles else "linear_pairs"]
            _run(function, x, packed, bias, y, dtype is torch.float32, *sizes)
            return y
        if x.dtype is not torch.float32:
            x = x.float()
        y = torch.empty((x.shape[0], num_outputs))
        narrow = "linear_split" if self._tiles else "linear_panels_bf16"
        _run(self._f[narrow if packed.dtype is torch.bfloat16 else "linear_f32"], x, packed, bias, y, *sizes)
        return y if dtype is torch.float32 else y.to(dtype)

    def linear_groups(
        self, x: torch.Tensor, packed: PackedMatrix, biases: torch.Tensor | None, counts: torch.Tensor
    ) -> torch.Tensor:
        if biases is not None:
            biases = biases.detach().float().contiguous()
        y, ends = torch.empty((x.shape[0], packed.num_outputs), dtype=x.dtype), counts.cumsum(0)
        first = Weight.on(self.name, packed, biases)
        _run(self._t["linear_groups"][x.dtype], x, byref(first), y, ends, len(counts))
        return y

    def route(self, logits: torch.Tensor, count: int, renormalised: bool) -> tuple[torch.Tensor, torch.Tensor]:
        rows, experts = logits.shape
        chosen, shares = torch.empty((rows, count), dtype=torch.int32), torch.empty((rows, count))
        _run(self._f["route"], logits, chosen, shares, rows, experts, count, renormalised)
        return chosen, shares

    def mixture(
        self, x: torch.Tensor, gate_up: PackedMatrix, down: PackedMatrix, chosen: torch.Tensor, shares: torch.Tensor
    ) -> torch.Tensor:
        y, (rows, per_row) = torch.empty_like(x), chosen.shape
        experts = Experts(*(Weight.on(self.name, packed, None) for packed in (gate_up, down)), len(gate_up.storage))
        _run(self._t["mixture"][x.dtype], byref(experts), x, chosen, shares, y, rows, per_row)
        return y

    def linear_backward(
        self, x: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor, needs: tuple[bool, bool]
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        x, weight = x.contiguous(), weight.contiguous()
        if self._tiles and len(x):
            return self._linear_backward_on_tiles(x, weight, grad.contiguous(), needs)
        grad = grad if grad.stride(1) == 1 else grad.contiguous()
        sizes = (len(x), *weight.shape, self._pairs)
        dx = dw = None
        if needs[0]:
            dx = torch.empty_like(x)
            _run(self._t["input_gradient"][x.dtype], grad, grad.stride(0), weight, dx, *sizes)
        if needs[1]:
            dw = torch.empty_like(weight)
            _run(self._t["weight_gradient"][x.dtype], grad, grad.stride(0), x, dw, *sizes)
        return dx, dw

    def _linear_backward_on_tiles(
        self, x: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor, needs: tuple[bool, bool]
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Compute `linear_backward` of contiguous tensors; in bfloat16 both gradients are products of transposes."""
        (num_rows, depth), outputs = x.shape, weight.shape[0]
        dx = dw = None
        if needs[0]:
            dx = self.linear(grad, self._transposed_panels(weight), None, depth, x.dtype)
        if needs[1] and x.dtype is torch.bfloat16:
            turned = torch.empty(outputs, num_rows, dtype=torch.bfloat16)
            _run(self._f["transpose_bf16"], grad, turned, num_rows, outputs)
            dw = self.linear(turned, self._transposed_panels(x), None, depth, x.dtype)
        elif needs[1]:
            dw = torch.empty(outputs, depth)
            _run(self._f["weight_gradient_split"], x, grad, dw, num_rows, outputs, depth)
        return dx, dw

    def _transposed_panels(self, matrix: torch.Tensor) -> torch.Tensor:
        narrow, (rows, columns) = matrix.dtype is torch.bfloat16, matrix.shape
        panels = torch.empty(-(-columns // PANEL), *_tile_panel(rows, 1 if narrow else PLANES), dtype=torch.bfloat16)
        _run(self._f["pack_bf16_transposed" if narrow else "pack_split_transposed"], matrix, panels, rows, columns)
        return panels

    def sum_rows(self, grad: torch.Tensor) -> torch.Tensor:
        grad = grad if grad.stride(1) == 1 else grad.contiguous()
        total = torch.empty(grad.shape[1])
        _run(self._t["sum_rows"][grad.dtype], grad, grad.stride(0), total, *grad.shape)
        return total

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        y = torch.empty_like(x)
        _run(self._t["rms_norm"][x.dtype], x, weight, y, *x.shape, eps)
        return y

    def rms_norm_backward(
        self, x: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows, width = x.shape
        dx, partial = torch.empty_like(x), torch.zeros(max(1, -(-rows // ROWS_PER_PARTIAL)), width)
        _run(self._t["rms_norm_backward"][x.dtype], x, weight, grad, dx, partial, rows, width, eps)
        return dx, partial[0].to(weight.dtype)

    def silu_mul(self, gate: torch.Tensor, up: torch.Tensor | None) -> torch.Tensor:
        y = torch.empty_like(gate)
        _run(self._t["silu_mul"][gate.dtype], gate, up, y, gate.numel())
        return y

    def silu_mul_backward(
        self, gate: torch.Tensor, up: torch.Tensor | None, grad: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        dgate, dup = torch.empty_like(gate), None if up is None else torch.empty_like(up)
        _run(self._t["silu_mul_backward"][gate.dtype], gate, up, grad, dgate, dup, gate.numel())
        return dgate, dup

    def tanh(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.empty_like(x)
        _run(self._f["tanh"], x, y, x.numel())
        return y

    def rope(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, transposed: bool) -> torch.Tensor:
        y = torch.empty_like(x)
        _run(self._t["rope"][x.dtype], x, cos, sin, y, *x.shape, transposed)
        return y

    def add_rms_norm(
        self, x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total, normed = torch.empty_like(x), torch.empty_like(x)
        _run(self._t["add_rms_norm"][x.dtype], x, y, weight, total, normed, *x.shape, eps)
        return total, normed

    def add_rms_norm_backward(
        self, total: torch.Tensor, weight: torch.Tensor, grad_total: torch.Tensor | None, grad: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows, width = total.shape
        dx, partial = torch.empty_like(total), torch.zeros(max(1, -(-rows // ROWS_PER_PARTIAL)), width)
        tensors = (total, weight, grad_total, grad, dx, partial)
        _run(self._t["add_rms_norm_backward"][total.dtype], *tensors, rows, width, eps)
        return dx, partial[0].to(weight.dtype)

    def split_heads(
        self,
        qkv: torch.Tensor,
        angles: Angles,
        norms: Norms | None,
        heads: int,
        kv_heads: int,
    ) -> Heads:
        tokens, size = angles[0].shape
        q = torch.empty(tokens, heads, size, dtype=qkv.dtype)
        k, v = (torch.empty(tokens, kv_heads, size, dtype=qkv.dtype) for _ in range(2))
        q_weight, k_weight, eps = norms or (None, None, 0.0)
        tensors, sizes = (qkv, q_weight, k_weight, *angles, q, k, v), (qkv.stride(0), tokens, heads, kv_heads, size)
        _run(self._t["split_heads"][qkv.dtype], *tensors, *sizes, eps)
        return q, k, v

    def split_heads_backward(
        self,
        qkv: torch.Tensor,
        angles: Angles,
        norms: Norms | None,
        grads: Heads,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        tokens, heads, size = grads[0].shape
        out = torch.empty(qkv.shape, dtype=qkv.dtype)
        q_weight, k_weight, eps = norms or (None, None, 0.0)
        partial = None if norms is None else torch.zeros(max(1, -(-tokens // ROWS_PER_PARTIAL)), 2, size)
        tensors = (qkv, q_weight, k_weight, *angles, *grads, out, partial)
        sizes = (qkv.stride(0), tokens, heads, grads[1].shape[1], size)
        _run(self._t["split_heads_backward"][qkv.dtype], *tensors, *sizes, eps)
        if partial is None:
            return out, None, None
        of_q, of_k = partial[0].to(qkv.dtype).unbind(0)
        return out, of_q, of_k

    def swiglu(self, gate_up: torch.Tensor) -> torch.Tensor:
        rows, width = gate_up.shape
        y = torch.empty(rows, width // 2, dtype=gate_up.dtype)
        _run(self._t["swiglu"][gate_up.dtype], gate_up, y, gate_up.stride(0), rows, width // 2)
        return y

    def swiglu_backward(self, gate_up: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        out = torch.empty(gate_up.shape, dtype=gate_up.dtype)
        _run(self._t["swiglu_backward"][gate_up.dtype], gate_up, grad, out, gate_up.stride(0), *grad.shape)
        return out

    def attention_packed(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens: torch.Tensor,
        form: AttentionForm,
        shared: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out = torch.empty_like(q)
        tokens, heads, size = q.shape
        logsumexp = torch.empty(tokens, heads)
        sizes = (cu_seqlens.numel() - 1, heads, k.shape[1], size)
        tensors = (q, k, v, out, logsumexp, cu_seqlens, shared)
        _run(self._t["attention_packed"][q.dtype], *tensors, *sizes, *form.numbers, sinks)
        return out, logsumexp

    def attention_packed_backward(self, saved: SavedAttention, grad: torch.Tensor, form: AttentionForm) -> Heads:
        q, k, v, cu_seqlens, shared, out, logsumexp = saved
        dq, (dk, dv) = torch.empty_like(q), torch.empty(2, *k.shape).unbind(0)
        tensors = (q, k, v, out, grad, logsumexp, dq, dk, dv, cu_seqlens, shared)
        sizes = (cu_seqlens.numel() - 1, q.shape[1], k.shape[1], q.shape[2])
        _run(self._t["attention_backward"][q.dtype], *tensors, *sizes, *form.numbers)
        return dq, dk.to(k.dtype), dv.to(v.dtype)

    def attention_paged(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        pages: tuple[torch.Tensor, torch.Tensor],
        rows: PagedRows,
        form: AttentionForm,
        sinks: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, int]:
        keys, values = pages
        tables, cu_rows, lengths = rows[:3]
        out = torch.empty_like(q)
        where = (keys, values, values.shape[0], values.shape[2], tables, cu_rows, lengths, *tables.shape)
        sizes = (q.shape[1], k.shape[1], q.shape[2])
        bad = _run(self._t["attention_paged"][q.dtype], q, k, v, out, *where, *sizes, *form.numbers, sinks)
        return out, bad

    def token_logprobs(
        self, logits: torch.Tensor, targets: torch.Tensor, temperature: torch.Tensor, kept: KeptRows | None = None
    ) -> tuple[tuple[torch.Tensor, ...], int]:
        rows, vocabulary = logits.shape
        results = torch.empty(4, rows).unbind(0)
        tensors = (logits, targets, temperature, *(kept or (None, None)), *results)
        return results, _run(self._f["token_logprobs"], *tensors, rows, vocabulary)

    def token_logprobs_backward(
        self,
        saved: SavedLogprobs,
        grad_logprob: torch.Tensor,
        grad_entropy: torch.Tensor | None,
        kept: KeptRows | None = None,
        *,
        spent: bool = False,
    ) -> torch.Tensor:
        logits = saved[0]
        grad = logits if spent else torch.empty_like(logits)  # a row is read before it is written
        tensors = (*saved[:3], *(kept or (None, None)), *saved[3:], grad_logprob, grad_entropy, grad)
        _run(self._f["token_logprobs_backward"], *tensors, *logits.shape)
        return grad

    def sample(
        self, logits: torch.Tensor, requests: SamplingRows, masks: np.ndarray | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows, vocabulary = logits.shape
        tokens, logprobs = torch.empty(rows, dtype=torch.int64), torch.empty(rows)
        bits = None if masks is None else masks.ctypes.data
        _run(self._f["sample"], logits, *requests, tokens, logprobs, bits, rows, vocabulary)
        return tokens, logprobs

    def decoder_step(self, plan: Structure, step: Structure, dtype: torch.dtype) -> int:
        status: int = self._t["decoder_step"][dtype](byref(plan), byref(step))
        return status


def _run(function: Any, *arguments: Any) -> int:
    """Call a compiled function with the addresses of tensors, other values as they are, and the number of threads."""
    values = [one if type(one) in PLAIN else one.data_ptr() for one in arguments]
    status: int = function(*values, torch.get_num_threads())
    return status


def _tile_panel(num_inputs: int, planes: int) -> tuple[int, ...]:
    return (2, -(-num_inputs // TILE_DEPTH), planes, TILE_DEPTH // 2, PANEL // 2, 2)
