"""Operations on tensors without values, of torch's meta device: they allocate their results and compute nothing.

A model that is made and trained on this device shows how much memory a real model of the same shape takes on the path
that the meta path stands for. Letters as in `ops`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from sparring.kernels.form import AttentionForm
from sparring.kernels.kept import KeptRows
from sparring.kernels.pages import PagedRows
from sparring.kernels.path import Angles, Heads, KernelPath, Norms, SamplingRows, SavedAttention, SavedLogprobs


class MetaPath:
    """Path that returns the shapes and dtypes of another one. Implements `KernelPath`.

    Args:
        stands_for: function that returns the path to stand for, which determines how weights are packed.
    """

    def __init__(self, stands_for: Callable[[], KernelPath]) -> None:
        self._stands_for = stands_for

    @property
    def name(self) -> str:
        return self._stands_for().name

    @property
    def is_compiled(self) -> bool:
        return self._stands_for().is_compiled

    @property
    def transposes_keys(self) -> bool:
        return self._stands_for().transposes_keys

    def pack(self, weights: Sequence[torch.Tensor], storage: torch.Tensor | None) -> torch.Tensor:
        if storage is not None:
            return storage
        shape, dtype = self.packed_layout([len(weight) for weight in weights], weights[0].shape[1], weights[0].dtype)
        return torch.empty(shape, dtype=dtype, device="meta")

    def packed_layout(
        self, counts: Sequence[int], depth: int, dtype: torch.dtype
    ) -> tuple[tuple[int, ...], torch.dtype]:
        return self._stands_for().packed_layout(counts, depth, dtype)

    def linear(
        self, x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, num_outputs: int, dtype: torch.dtype
    ) -> torch.Tensor:
        return x.new_empty((x.shape[0], num_outputs), dtype=dtype)

    def linear_backward(
        self, x: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor, needs: tuple[bool, bool]
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        dx = x.new_empty(x.shape) if needs[0] else None
        return dx, weight.new_empty(weight.shape, dtype=x.dtype) if needs[1] else None

    def sum_rows(self, grad: torch.Tensor) -> torch.Tensor:
        return grad.new_empty(grad.shape[1], dtype=torch.float32)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return torch.empty_like(x)

    def rms_norm_backward(
        self, x: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.empty_like(x), torch.empty_like(weight)

    def add_rms_norm(
        self, x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.empty_like(x), torch.empty_like(x)

    def add_rms_norm_backward(
        self, total: torch.Tensor, weight: torch.Tensor, grad_total: torch.Tensor | None, grad: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.empty_like(total), torch.empty_like(weight)

    def silu_mul(self, gate: torch.Tensor, up: torch.Tensor | None) -> torch.Tensor:
        return torch.empty_like(gate)

    def silu_mul_backward(
        self, gate: torch.Tensor, up: torch.Tensor | None, grad: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return torch.empty_like(gate), None if up is None else torch.empty_like(up)

    def swiglu(self, gate_up: torch.Tensor) -> torch.Tensor:
        return gate_up.new_empty((gate_up.shape[0], gate_up.shape[1] // 2))

    def swiglu_backward(self, gate_up: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        return gate_up.new_empty(gate_up.shape)

    def tanh(self, x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    def rope(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, transposed: bool) -> torch.Tensor:
        return torch.empty_like(x)

    def split_heads(self, qkv: torch.Tensor, angles: Angles, norms: Norms | None, heads: int, kv_heads: int) -> Heads:
        tokens, size = angles[0].shape
        q, k, v = (qkv.new_empty((tokens, count, size)) for count in (heads, kv_heads, kv_heads))
        return q, k, v

    def split_heads_backward(
        self, qkv: torch.Tensor, angles: Angles, norms: Norms | None, grads: Heads
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        of_norms = (None, None) if norms is None else tuple(torch.empty_like(weight) for weight in norms[:2])
        return qkv.new_empty(qkv.shape), *of_norms

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
        return torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)

    def attention_packed_backward(self, saved: SavedAttention, grad: torch.Tensor, form: AttentionForm) -> Heads:
        """Allocate gradients of q, k, v; those of keys and values are added up in float32."""
        q, k, v = saved[:3]
        dq, (dk, dv) = torch.empty_like(q), q.new_empty((2, *k.shape), dtype=torch.float32).unbind(0)
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
        return torch.empty_like(q), -1

    def token_logprobs(
        self, logits: torch.Tensor, targets: torch.Tensor, temperature: torch.Tensor, kept: KeptRows | None = None
    ) -> tuple[tuple[torch.Tensor, ...], int]:
        return logits.new_empty((4, logits.shape[0])).unbind(0), -1

    def token_logprobs_backward(
        self,
        saved: SavedLogprobs,
        grad_logprob: torch.Tensor,
        grad_entropy: torch.Tensor | None,
        kept: KeptRows | None = None,
        *,
        spent: bool = False,
    ) -> torch.Tensor:
        return saved[0] if spent else torch.empty_like(saved[0])

    def sample(
        self, logits: torch.Tensor, requests: SamplingRows, masks: np.ndarray | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = logits.shape[0]
        return logits.new_empty(rows, dtype=torch.int64), logits.new_empty(rows)
