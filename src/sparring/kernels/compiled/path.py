"""Compiled kernels as functions on torch tensors, without gradients: `ops` adds those.

Every function takes contiguous CPU tensors of float32 or bfloat16 and allocates its result. N rows or tokens, D width,
K inputs, M outputs, H query heads, G key/value heads, d head size (a multiple of 16), B sequences, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Structure, byref

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
        threads, sizes = torch.get_num_threads(), (x.shape[0], num_outputs, x.shape[1])
        if x.dtype is torch.bfloat16 and (self._tiles or self._pairs):
            y = torch.empty((x.shape[0], num_outputs), dtype=dtype)
            pointers = (x.data_ptr(), packed.data_ptr(), None if bias is None else bias.data_ptr(), y.data_ptr())
            self._f["linear_bf16" if self._tiles else "linear_pairs"](
                *pointers, dtype is torch.float32, *sizes, threads
            )
            return y
        if x.dtype is not torch.float32:
            x = x.float()
        y = torch.empty((x.shape[0], num_outputs))
        narrow = "linear_split" if self._tiles else "linear_panels_bf16"
        call = self._f[narrow if packed.dtype is torch.bfloat16 else "linear_f32"]
        call(x.data_ptr(), packed.data_ptr(), None if bias is None else bias.data_ptr(), y.data_ptr(), *sizes, threads)
        return y if dtype is torch.float32 else y.to(dtype)

    def linear_groups(
        self, x: torch.Tensor, packed: PackedMatrix, biases: torch.Tensor | None, counts: torch.Tensor
    ) -> torch.Tensor:
        if biases is not None:
            biases = biases.detach().float().contiguous()
        y, ends = torch.empty((x.shape[0], packed.num_outputs), dtype=x.dtype), counts.cumsum(0)
        first = Weight.on(self.name, packed, biases)
        call = self._t["linear_groups"][x.dtype]
        call(x.data_ptr(), byref(first), y.data_ptr(), ends.data_ptr(), len(counts), torch.get_num_threads())
        return y

    def route(self, logits: torch.Tensor, count: int, renormalised: bool) -> tuple[torch.Tensor, torch.Tensor]:
        rows, experts = logits.shape
        chosen, shares = torch.empty((rows, count), dtype=torch.int32), torch.empty((rows, count))
        pointers = (logits.data_ptr(), chosen.data_ptr(), shares.data_ptr())
        self._f["route"](*pointers, rows, experts, count, renormalised, torch.get_num_threads())
        return chosen, shares

    def mixture(
        self, x: torch.Tensor, gate_up: PackedMatrix, down: PackedMatrix, chosen: torch.Tensor, shares: torch.Tensor
    ) -> torch.Tensor:
        y, (rows, per_row) = torch.empty_like(x), chosen.shape
        experts = Experts(*(Weight.on(self.name, packed, None) for packed in (gate_up, down)), len(gate_up.storage))
        pointers = (byref(experts), *(t.data_ptr() for t in (x, chosen, shares, y)))
        self._t["mixture"][x.dtype](*pointers, rows, per_row, torch.get_num_threads())
        return y

    def linear_backward(
        self, x: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor, needs: tuple[bool, bool]
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        x, weight = x.contiguous(), weight.contiguous()
        if self._tiles and len(x):
            return self._linear_backward_on_tiles(x, weight, grad.contiguous(), needs)
        grad = grad if grad.stride(1) == 1 else grad.contiguous()
        sizes = (len(x), *weight.shape, self._pairs, torch.get_num_threads())
        dx = dw = None
        if needs[0]:
            dx = torch.empty_like(x)
            call = self._t["input_gradient"][x.dtype]
            call(grad.data_ptr(), grad.stride(0), weight.data_ptr(), dx.data_ptr(), *sizes)
        if needs[1]:
            dw = torch.empty_like(weight)
            call = self._t["weight_gradient"][x.dtype]
            call(grad.data_ptr(), grad.stride(0), x.data_ptr(), dw.data_ptr(), *sizes)
        return dx, dw

    def _linear_backward_on_tiles(
        self, x: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor, needs: tuple[bool, bool]
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Compute `linear_backward` of contiguous tensors; in bfloat16 both gradients are products of transposes."""
        (num_rows, depth), outputs, threads = x.shape, weight.shape[0], torch.get_num_threads()
        dx = dw = None
        if needs[0]:
            dx = self.linear(grad, self._transposed_panels(weight), None, depth, x.dtype)
        if needs[1] and x.dtype is torch.bfloat16:
            turned = torch.empty(outputs, num_rows, dtype=torch.bfloat16)
            self._f["transpose_bf16"](grad.data_ptr(), turned.data_ptr(), num_rows, outputs, threads)
            dw = self.linear(turned, self._transposed_panels(x), None, depth, x.dtype)
        elif needs[1]:
            dw = torch.empty(outputs, depth)
            call = self._f["weight_gradient_split"]
            call(x.data_ptr(), grad.data_ptr(), dw.data_ptr(), num_rows, outputs, depth, threads)
        return dx, dw

    def _transposed_panels(self, matrix: torch.Tensor) -> torch.Tensor:
        narrow, (rows, columns) = matrix.dtype is torch.bfloat16, matrix.shape
        panels = torch.empty(-(-columns // PANEL), *_tile_panel(rows, 1 if narrow else PLANES), dtype=torch.bfloat16)
        call = self._f["pack_bf16_transposed" if narrow else "pack_split_transposed"]
        call(matrix.data_ptr(), panels.data_ptr(), rows, columns, torch.get_num_threads())
        return panels

    def sum_rows(self, grad: torch.Tensor) -> torch.Tensor:
        grad = grad if grad.stride(1) == 1 else grad.contiguous()
        total = torch.empty(grad.shape[1])
        call = self._t["sum_rows"][grad.dtype]
        call(grad.data_ptr(), grad.stride(0), total.data_ptr(), *grad.shape, torch.get_num_threads())
        return total

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        y = torch.empty_like(x)
        rows, width = x.shape
        call = self._t["rms_norm"][x.dtype]
        call(x.data_ptr(), weight.data_ptr(), y.data_ptr(), rows, width, eps, torch.get_num_threads())
        return y

    def rms_norm_backward(
        self, x: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows, width = x.shape
        dx, partial = torch.empty_like(x), torch.zeros(max(1, -(-rows // ROWS_PER_PARTIAL)), width)
        self._t["rms_norm_backward"][x.dtype](
            x.data_ptr(),
            weight.data_ptr(),
            grad.data_ptr(),
            dx.data_ptr(),
            partial.data_ptr(),
            rows,
            width,
            eps,
            torch.get_num_threads(),
        )
        return dx, partial[0].to(weight.dtype)

    def silu_mul(self, gate: torch.Tensor, up: torch.Tensor | None) -> torch.Tensor:
        y = torch.empty_like(gate)
        second = None if up is None else up.data_ptr()
        call = self._t["silu_mul"][gate.dtype]
        call(gate.data_ptr(), second, y.data_ptr(), gate.numel(), torch.get_num_threads())
        return y

    def silu_mul_backward(
        self, gate: torch.Tensor, up: torch.Tensor | None, grad: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        dgate, dup = torch.empty_like(gate), None if up is None else torch.empty_like(up)
        self._t["silu_mul_backward"][gate.dtype](
            gate.data_ptr(),
            None if up is None else up.data_ptr(),
            grad.data_ptr(),
            dgate.data_ptr(),
            None if dup is None else dup.data_ptr(),
            gate.numel(),
            torch.get_num_threads(),
        )
        return dgate, dup

    def tanh(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.empty_like(x)
        self._f["tanh"](x.data_ptr(), y.data_ptr(), x.numel(), torch.get_num_threads())
        return y

    def rope(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, transposed: bool) -> torch.Tensor:
        y = torch.empty_like(x)
        tokens, heads, size = x.shape
        call = self._t["rope"][x.dtype]
        threads = torch.get_num_threads()
        call(x.data_ptr(), cos.data_ptr(), sin.data_ptr(), y.data_ptr(), tokens, heads, size, transposed, threads)
        return y

    def add_rms_norm(
        self, x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total, normed = torch.empty_like(x), torch.empty_like(x)
        pointers = [t.data_ptr() for t in (x, y, weight, total, normed)]
        self._t["add_rms_norm"][x.dtype](*pointers, *x.shape, eps, torch.get_num_threads())
        return total, normed

    def add_rms_norm_backward(
        self, total: torch.Tensor, weight: torch.Tensor, grad_total: torch.Tensor | None, grad: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows, width = total.shape
        dx, partial = torch.empty_like(total), torch.zeros(max(1, -(-rows // ROWS_PER_PARTIAL)), width)
        pointers = [None if t is None else t.data_ptr() for t in (total, weight, grad_total, grad, dx, partial)]
        self._t["add_rms_norm_backward"][total.dtype](*pointers, rows, width, eps, torch.get_num_threads())
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
        pointers = [None if t is None else t.data_ptr() for t in (qkv, q_weight, k_weight, *angles, q, k, v)]
        sizes = (qkv.stride(0), tokens, heads, kv_heads, size)
        self._t["split_heads"][qkv.dtype](*pointers, *sizes, eps, torch.get_num_threads())
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
        pointers = [None if t is None else t.data_ptr() for t in tensors]
        sizes = (qkv.stride(0), tokens, heads, grads[1].shape[1], size)
        self._t["split_heads_backward"][qkv.dtype](*pointers, *sizes, eps, torch.get_num_threads())
        if partial is None:
            return out, None, None
        of_q, of_k = partial[0].to(qkv.dtype).unbind(0)
        return out, of_q, of_k

    def swiglu(self, gate_up: torch.Tensor) -> torch.Tensor:
        rows, width = gate_up.shape
        y = torch.empty(rows, width // 2, dtype=gate_up.dtype)
        call = self._t["swiglu"][gate_up.dtype]
        call(gate_up.data_ptr(), y.data_ptr(), gate_up.stride(0), rows, width // 2, torch.get_num_threads())
        return y

    def swiglu_backward(self, gate_up: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        out = torch.empty(gate_up.shape, dtype=gate_up.dtype)
        pointers = [t.data_ptr() for t in (gate_up, grad, out)]
        self._t["swiglu_backward"][gate_up.dtype](*pointers, gate_up.stride(0), *grad.shape, torch.get_num_threads())
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
        self._t["attention_packed"][q.dtype](
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            out.data_ptr(),
            logsumexp.data_ptr(),
            cu_seqlens.data_ptr(),
            None if shared is None else shared.data_ptr(),
            cu_seqlens.numel() - 1,
            heads,
            k.shape[1],
            size,
            *form.numbers,
            None if sinks is None else sinks.data_ptr(),
            torch.get_num_threads(),
        )
        return out, logsumexp

    def attention_packed_backward(self, saved: SavedAttention, grad: torch.Tensor, form: AttentionForm) -> Heads:
        q, k, v, cu_seqlens, shared, out, logsumexp = saved
        dq, (dk, dv) = torch.empty_like(q), torch.empty(2, *k.shape).unbind(0)
        tensors = (q, k, v, out, grad, logsumexp, dq, dk, dv, cu_seqlens, shared)
        pointers = [None if t is None else t.data_ptr() for t in tensors]
        sizes = (cu_seqlens.numel() - 1, q.shape[1], k.shape[1], q.shape[2])
        self._t["attention_backward"][q.dtype](*pointers, *sizes, *form.numbers, torch.get_num_threads())
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
        bad = self._t["attention_paged"][q.dtype](
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            out.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            values.shape[0],
            values.shape[2],
            tables.data_ptr(),
            cu_rows.data_ptr(),
            lengths.data_ptr(),
            tables.shape[0],
            tables.shape[1],
            q.shape[1],
            k.shape[1],
            q.shape[2],
            *form.numbers,
            None if sinks is None else sinks.data_ptr(),
            torch.get_num_threads(),
        )
        return out, bad

    def token_logprobs(
        self, logits: torch.Tensor, targets: torch.Tensor, temperature: torch.Tensor, kept: KeptRows | None = None
    ) -> tuple[tuple[torch.Tensor, ...], int]:
        rows, vocabulary = logits.shape
        results = torch.empty(4, rows).unbind(0)
        tensors = (logits, targets, temperature, *(kept or (None, None)), *results)
        pointers = [None if t is None else t.data_ptr() for t in tensors]
        bad = self._f["token_logprobs"](*pointers, rows, vocabulary, torch.get_num_threads())
        return results, bad

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
        pointers = [None if t is None else t.data_ptr() for t in tensors]
        self._f["token_logprobs_backward"](*pointers, *logits.shape, torch.get_num_threads())
        return grad

    def sample(
        self, logits: torch.Tensor, requests: SamplingRows, masks: np.ndarray | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows, vocabulary = logits.shape
        tokens, logprobs = torch.empty(rows, dtype=torch.int64), torch.empty(rows)
        pointers: list[int | None] = [t.data_ptr() for t in (logits, *requests, tokens, logprobs)]
        pointers.append(None if masks is None else masks.ctypes.data)
        self._f["sample"](*pointers, rows, vocabulary, torch.get_num_threads())
        return tokens, logprobs

    def decoder_step(self, plan: Structure, step: Structure, dtype: torch.dtype) -> int:
        status: int = self._t["decoder_step"][dtype](byref(plan), byref(step))
        return status


def _tile_panel(num_inputs: int, planes: int) -> tuple[int, ...]:
    return (2, -(-num_inputs // TILE_DEPTH), planes, TILE_DEPTH // 2, PANEL // 2, 2)
