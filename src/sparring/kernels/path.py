"""Protocol of a path: a set of row-invariant operations on torch tensors, each with one fixed order of additions.

`ops` checks shapes and adds gradients; a path computes. Paths are in `torch/`, `compiled/` and `device/`;
`paths` chooses one. Every path promises:

- Row invariance: the bits of an output row depend on that row's inputs alone; not on the number of rows, on the
  neighbours, on the packing, on the pages or on the number of threads.
- Gradients do not depend on the number of threads. Those of weights are sums over rows and depend on which rows are
  together.
- Sums are in float32; a bfloat16 result is rounded once, at the end. Two paths may differ in their last bits.

Unless stated otherwise, an operation takes contiguous tensors of one dtype, float32 or bfloat16, which its caller has
checked, allocates its result and records no gradient. A `..._backward` maps gradients of outputs to gradients of
inputs.

Shapes: N rows or tokens, D width, K inputs, M outputs, E experts, k experts per row, H query heads, G key/value heads,
d head size (a multiple of 16), I width of an MLP, B sequences, V vocabulary, W = ceil(V / 64) words of a mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Structure
from typing import Protocol

import numpy as np
import torch

from sparring.kernels.attention_scores import AttentionForm
from sparring.kernels.pages import PagedRows
from sparring.kernels.truncation import KeptRows

Norms = tuple[torch.Tensor, torch.Tensor, float]
"""Weights [d] of the norms of queries and of keys, and their epsilon."""

Angles = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines of the rotary embedding, [N, d] each."""

Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Queries [N, H, d], keys [N, G, d] and values [N, G, d], or their gradients."""

SavedAttention = tuple[
    torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor
]
"""Tensors saved by the forward of packed attention: q, k, v, cu_seqlens, shared, o and logsumexp."""

SavedLogprobs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Tensors saved by the forward of `token_logprobs`: logits [N, V], and targets, temperature, entropy, maximum, log_sum
[N]."""

SamplingRows = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Columns [N] of sampling settings: temperature float32, top_k int64, top_p, min_p float32, seed, position int64,
limited uint8."""


class PackedMatrix(Protocol):
    """Weight [M, K], or E weights of one shape, in the layout of `pack`."""

    storage: torch.Tensor
    num_outputs: int
    num_inputs: int
    dtype: torch.dtype


class KernelPath(Protocol):
    """Operations that every path computes."""

    @property
    def name(self) -> str:
        """Return the name that runs record, such as "exact-kernels": equal names mean equal bits on one machine."""

    @property
    def is_compiled(self) -> bool:
        """Return True if the path is a `FusedPath`."""

    @property
    def transposes_keys(self) -> bool:
        """Return True if pages store keys in transposed blocks of 16 positions; see `KvPages`."""

    def pack(self, weights: Sequence[torch.Tensor], storage: torch.Tensor | None) -> torch.Tensor:
        """Join weights[i] [M_i, K] to one [M, K] in the layout that `linear` reads, in new memory or, if given, in
        `storage`: the result of an earlier call with these shapes, which is overwritten."""

    def packed_layout(
        self, counts: Sequence[int], depth: int, dtype: torch.dtype
    ) -> tuple[tuple[int, ...], torch.dtype]:
        """Return shape and dtype that `pack` gives weights[i] [counts[i], depth] of `dtype`, without computing it."""

    def linear(
        self, x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, num_outputs: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """Multiply: x[N, K], `packed` from `pack`, bias[M] of any dtype -> x W^T + bias, [N, M] of `dtype` (float32 or
        bfloat16). The bias is added in float32."""

    def linear_backward(
        self, x: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor, needs: tuple[bool, bool]
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the gradients of x[N, K] and weight[M, K] from the gradient of y[N, M], all of one dtype; None for a
        gradient that `needs` excludes. `grad` may be strided."""

    def sum_rows(self, grad: torch.Tensor) -> torch.Tensor:
        """Sum grad[N, M], which may be strided, over rows -> [M] float32. The order depends on N alone."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Normalise x[N, D] by its root mean square, times weight[D] -> [N, D], rounded as `ops.rms_norm` says."""

    def rms_norm_backward(
        self, x: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gradients of x[N, D] and weight[D]."""

    def add_rms_norm(
        self, x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return x + y and its `rms_norm`, x[N, D], y[N, D]; bitwise equal to the separate operations."""

    def add_rms_norm_backward(
        self, total: torch.Tensor, weight: torch.Tensor, grad_total: torch.Tensor | None, grad: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the common gradient of x and y, and the gradient of weight[D], from `grad_total`, the gradient of the
        sum (None: zero), and `grad`, that of its norm."""

    def silu_mul(self, gate: torch.Tensor, up: torch.Tensor | None) -> torch.Tensor:
        """Return silu(gate) * up, of any shape; silu(gate) without `up`."""

    def silu_mul_backward(
        self, gate: torch.Tensor, up: torch.Tensor | None, grad: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the gradients of gate and up."""

    def swiglu(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Return silu(gate) * up [N, I] for gate_up[N, 2 I], whose rows may have any stride."""

    def swiglu_backward(self, gate_up: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        """Return the gradient of gate_up, [N, 2 I]."""

    def tanh(self, x: torch.Tensor) -> torch.Tensor:
        """Return the hyperbolic tangent of x, float32 of any shape."""

    def rope(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, transposed: bool) -> torch.Tensor:
        """Rotate x[N, H, d] by cos[N, d], sin[N, d] in the half-split layout; with `transposed` rotate back."""

    def split_heads(self, qkv: torch.Tensor, angles: Angles, norms: Norms | None, heads: int, kv_heads: int) -> Heads:
        """Split qkv[N, (H + 2 G) d], whose rows may have any stride, as `ops.split_heads`."""

    def split_heads_backward(
        self, qkv: torch.Tensor, angles: Angles, norms: Norms | None, grads: Heads
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Return the gradients of qkv and of the two norm weights [d] (None without `norms`)."""

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
        """Compute `ops.attention_packed`, with sinks [H] float32, and the logsumexp [N, H] float32 of scores and
        sink."""

    def attention_packed_backward(self, saved: SavedAttention, grad: torch.Tensor, form: AttentionForm) -> Heads:
        """Return the gradients of q, k and v from the gradient of o[N, H, d]."""

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
        """Write k, v[N, G, d] into one layer's pages (keys, values), then attend over them; bitwise equal to
        `attention_packed`.

        Returns:
            o[N, H, d], and -1 or the index of the first sequence whose table names no page or is too short (nothing was
                written). A GPU does not check tables and always returns -1.
        """

    def token_logprobs(
        self, logits: torch.Tensor, targets: torch.Tensor, temperature: torch.Tensor, kept: KeptRows | None = None
    ) -> tuple[tuple[torch.Tensor, ...], int]:
        """Compute softmax(logits / temperature) of logits[N, V] float32 for targets[N] int64, over the `kept` ids of a
        row if it has any; temperature[N] float32, 0 means 1.

        Returns:
            (logprob, entropy, maximum, log_sum), [N] float32 each; and -1 or the index of the first row whose target is
                no token id or not kept, or whose kept ids do not ascend; all results are then undefined.
        """

    def token_logprobs_backward(
        self,
        saved: SavedLogprobs,
        grad_logprob: torch.Tensor,
        grad_entropy: torch.Tensor | None,
        kept: KeptRows | None = None,
        *,
        spent: bool = False,
    ) -> torch.Tensor:
        """Return the gradient of the logits [N, V] from the gradients of logprob and entropy [N] (None: zero). If the
        logits are `spent`, it may overwrite them."""

    def sample(
        self, logits: torch.Tensor, requests: SamplingRows, masks: np.ndarray | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sample one token for each row of logits[N, V] float32 as `ops.sample` -> tokens [N] int64, logprobs [N]
        float32. The ids that a truncated draw kept become bits of masks [N, W] uint64; no row is truncated without
        `masks`."""


class FusedPath(KernelPath, Protocol):
    """Operations that a compiled path computes in one call; on other paths they are composed of several."""

    def route(self, logits: torch.Tensor, count: int, renormalised: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute `mixtures.route` of logits[N, E] float32; ties go to the lower index."""

    def linear_groups(
        self, x: torch.Tensor, packed: PackedMatrix, biases: torch.Tensor | None, counts: torch.Tensor
    ) -> torch.Tensor:
        """Compute `mixtures.linear_groups` -> [N, M]; counts are int64."""

    def mixture(
        self,
        x: torch.Tensor,
        gate_up: PackedMatrix,
        down: PackedMatrix,
        chosen: torch.Tensor,
        shares: torch.Tensor,
    ) -> torch.Tensor:
        """Compute `mixtures.mixture` of x[N, D] -> [N, D]."""

    def decoder_step(self, plan: Structure, step: Structure, dtype: torch.dtype) -> int:
        """Compute `ops.decoder_step` for pages of `dtype`; nothing is computed if a row is invalid."""
