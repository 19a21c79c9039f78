"""Operations on a GPU: Triton for products, norms, heads, attention, softmax and draws, torch for operations on single
elements or rows.

The operations of `kernels.path`, with their own bits; every row's bits depend on that row alone. Shapes as in `ops`; W
words of a mask.
"""

from __future__ import annotations

import importlib.util
import os
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from sparring.errors import refusal
from sparring.kernels.attention_scores import AttentionForm
from sparring.kernels.device.sampling import kept_of, words_of
from sparring.kernels.pages import PagedRows
from sparring.kernels.path import Angles, Heads, Norms, SamplingRows, SavedAttention, SavedLogprobs
from sparring.kernels.torch.operations import TorchOperations
from sparring.kernels.torch.path import walks
from sparring.kernels.truncation import KeptRows

if TYPE_CHECKING:  # it imports triton, which only some installs have
    from sparring.kernels.device.attention import Walk

    _Plan = tuple[Walk, torch.Tensor, list[torch.Tensor]]

NAME = "exact-device"


def is_interpreted() -> bool:
    """Return True if Triton's programs run in its interpreter on the CPU, for tests: TRITON_INTERPRET=1 before they
    load."""
    return os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None


class DevicePath(TorchOperations):
    """All operations on a GPU, and on the CPU with Triton's interpreter. Implements `KernelPath`."""

    name = NAME
    is_compiled = False
    transposes_keys = False

    def __init__(self) -> None:
        if importlib.util.find_spec("triton") is None:
            remedy = "install a CUDA build of torch, which brings it"
            raise refusal("numerics on a GPU", "the package triton", "none", remedy)
        from sparring.kernels.device import attention, linear, rows, rows_backward, softmax

        self._attention, self._linear, self._softmax = attention, linear, softmax
        self._rows, self._backward = rows, rows_backward
        self._last: tuple[weakref.ref[torch.Tensor], torch.Tensor | None, _Plan] | None = None

    def pack(self, weights: Sequence[torch.Tensor], storage: torch.Tensor | None) -> torch.Tensor:
        """Copy weights[M_i, K], joined, to `storage`. CUDA graphs keep its address, so an update writes in place."""
        parts = [weight.detach() for weight in weights]
        return torch.cat(parts) if storage is None else torch.cat(parts, out=storage)

    def packed_layout(
        self, counts: Sequence[int], depth: int, dtype: torch.dtype
    ) -> tuple[tuple[int, ...], torch.dtype]:
        return (sum(counts), depth), dtype

    def linear(
        self, x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, num_outputs: int, dtype: torch.dtype
    ) -> torch.Tensor:
        return self._linear.linear(x, packed, None if bias is None else bias.detach(), dtype)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return self._rows.add_rms_norm(x, None, weight, eps)[1]

    def add_rms_norm(
        self, x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._rows.add_rms_norm(x, y, weight, eps)

    def rms_norm_backward(
        self, x: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._backward.rms_norm_backward(x, weight, grad, eps)

    def add_rms_norm_backward(
        self, total: torch.Tensor, weight: torch.Tensor, grad_total: torch.Tensor | None, grad: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._backward.rms_norm_backward(total, weight, grad, eps, grad_total)

    def split_heads(self, qkv: torch.Tensor, angles: Angles, norms: Norms | None, heads: int, kv_heads: int) -> Heads:
        return self._rows.split_heads(qkv, angles, norms, heads, kv_heads)

    def swiglu(self, gate_up: torch.Tensor) -> torch.Tensor:
        return self._rows.swiglu(gate_up)

    def split_heads_backward(
        self, qkv: torch.Tensor, angles: Angles, norms: Norms | None, grads: Heads
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        return self._backward.split_heads_backward(qkv, angles, norms, grads)

    def swiglu_backward(self, gate_up: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        return self._backward.swiglu_backward(gate_up, grad)

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
        walk, _, _ = self._walk(cu_seqlens, shared, len(q))
        return self._attention.attend(q, k.unsqueeze(2), v.unsqueeze(2), walk, form, sinks)

    def attention_packed_backward(self, saved: SavedAttention, grad: torch.Tensor, form: AttentionForm) -> Heads:
        q, k, v, cu_seqlens, shared, out, logsumexp = saved
        walk, cu_lengths, paths = self._walk(cu_seqlens, shared, len(q))
        dq, *key_gradients = self._attention.attend_backward((q, k, v, out, logsumexp), grad, walk, cu_lengths, form)
        if paths:
            key_gradients = [_sum_positions(part, paths, len(k)) for part in key_gradients]
        return dq, key_gradients[0].to(k.dtype), key_gradients[1].to(v.dtype)

    def _walk(self, cu_seqlens: torch.Tensor, shared: torch.Tensor | None, rows: int) -> _Plan:
        """Describe packed rows as pages of one position; cached, because all layers of a forward share it. Also return
        the offset of each sequence in the concatenated positions and, if sequences share rows, the rows of each
        sequence."""
        last = self._last
        if last is not None and last[0]() is cu_seqlens and last[1] is shared:
            return last[2]
        paths, end = list(walks(cu_seqlens, shared)), int(cu_seqlens[-1])
        if end != rows:
            raise refusal("cu_seqlens", f"offsets that end at {rows}", str(end), "see Packed.of")
        lengths = torch.tensor([len(path) for path in paths], dtype=torch.int32)
        tables = torch.zeros(len(paths), max(map(len, paths), default=0), dtype=torch.int32)
        for table, path in zip(tables, paths, strict=True):
            table[: len(path)] = path
        device = cu_seqlens.device
        cu_lengths = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
        most = int(cu_seqlens.diff().max()) if len(paths) else 0
        walk = self._attention.Walk(tables.to(device), cu_seqlens, lengths.to(device), most)
        shares = shared is not None and bool(shared.any())
        plan = walk, cu_lengths.to(device), [path.to(device) for path in paths] if shares else []
        self._last = weakref.ref(cu_seqlens), shared, plan
        return plan

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
        most_rows = int(rows.cu_rows.diff().max()) if rows.most_rows is None else rows.most_rows
        walk = self._attention.Walk(rows.block_tables, rows.cu_rows, rows.context_lengths, most_rows)
        self._attention.write(k, v, *pages, walk)
        return self._attention.attend(q, *pages, walk, form, sinks)[0], -1

    def token_logprobs(
        self, logits: torch.Tensor, targets: torch.Tensor, temperature: torch.Tensor, kept: KeptRows | None = None
    ) -> tuple[tuple[torch.Tensor, ...], int]:
        wrong = (targets < 0) | (targets >= logits.shape[1])
        limits = kept_of(kept, logits.shape)
        if limits is not None:
            wrong = wrong | limits[1] | ~limits[0].gather(1, targets.clamp(0, logits.shape[1] - 1).unsqueeze(1))[:, 0]
        if bool(wrong.any()):
            return (logits[:, 0],) * 4, int(wrong.int().argmax())
        if limits is not None:
            logits = logits.masked_fill(~limits[0], float("-inf"))
        return self._softmax.log_statistics(logits, targets, temperature), -1

    def token_logprobs_backward(
        self,
        saved: SavedLogprobs,
        grad_logprob: torch.Tensor,
        grad_entropy: torch.Tensor | None,
        kept: KeptRows | None = None,
        *,
        spent: bool = False,
    ) -> torch.Tensor:
        limits = kept_of(kept, saved[0].shape)
        if limits is not None:
            saved = (saved[0].masked_fill(~limits[0], float("-inf")), *saved[1:])
        apart = limits is not None  # the logits of kept ids alone are a copy
        return self._softmax.logits_gradient(saved, grad_logprob, grad_entropy, spent=spent or apart)

    def sample(
        self, logits: torch.Tensor, requests: SamplingRows, masks: np.ndarray | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, logprobs, kept = self._softmax.draw(logits, requests, truncating=masks is not None)
        if masks is not None and kept is not None:
            truncated, allowed = kept
            masks[:] = words_of(allowed & truncated.unsqueeze(1))
        return tokens, logprobs


def _sum_positions(by_path: torch.Tensor, paths: list[torch.Tensor], rows: int) -> torch.Tensor:
    """Sum by_path [sum of lengths, G, d] at equal rows; paths[b] has the rows of sequence b's positions, in order."""
    total = by_path.new_zeros(rows, *by_path.shape[1:])
    for path, part in zip(paths, by_path.split([len(path) for path in paths]), strict=True):
        total[path] += part  # a sequence contains each row once
    return total
