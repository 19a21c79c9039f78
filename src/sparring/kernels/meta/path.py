"""Operations on tensors without values, of torch's meta device, that a model's forward needs: a model there shows how
large the real one is, and the shapes of its keys and values. Letters as in `ops`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from sparring.kernels.attention_scores import AttentionForm
from sparring.kernels.path import KernelPath


class MetaPath:
    """Path that packs weights in the layout of the path that `stands_for` returns, and computes nothing. Implements
    `KernelPath` as far as a model's forward calls it."""

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

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return torch.empty_like(x)

    def silu_mul(self, gate: torch.Tensor, up: torch.Tensor | None) -> torch.Tensor:
        return torch.empty_like(gate)

    def swiglu(self, gate_up: torch.Tensor) -> torch.Tensor:
        return gate_up.new_empty((gate_up.shape[0], gate_up.shape[1] // 2))

    def tanh(self, x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

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
