"""Forward of the Llama family (Llama, Mistral, Qwen2, Qwen3, and with experts Mixtral and Qwen3-MoE) over transformers'
modules, without its wrappers.

At small sizes transformers' forward spends more time in decorators, masks and caches than in arithmetic. This forward
calls the same modules on flat tokens; a parity test compares both in float64.

Shapes: N tokens, D width, H query heads, G key/value heads, d head size.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedConfig

from sparring.kernels import ops
from sparring.kernels.attention_scores import AttentionForm
from sparring.kernels.threads import take
from sparring.model.attention import Attention, attend
from sparring.model.experts import RowExperts, RowRouter
from sparring.model.layers import Product, RotaryTable, RowLinear, RowNorm

DENSE = ("llama", "mistral", "qwen2", "qwen3")
FAMILY = (*DENSE, "mixtral", "qwen3_moe")
"""`model_type`s with this decoder layer, whose numerics our own tests prove."""


class LlamaAttention(Protocol):
    """Attention module of transformers, after `swap`; some models have norms of queries and keys."""

    config: PreTrainedConfig
    head_dim: int
    scaling: float
    q_proj: RowLinear
    k_proj: RowLinear
    v_proj: RowLinear
    o_proj: RowLinear


class LlamaMlp(Protocol):
    """MLP module of transformers: three projections, or a router and experts."""

    gate_proj: RowLinear
    up_proj: RowLinear
    down_proj: RowLinear
    gate: RowRouter
    experts: RowExperts


class LlamaLayer(Protocol):
    """Decoder layer module of transformers."""

    self_attn: LlamaAttention
    mlp: LlamaMlp
    input_layernorm: RowNorm
    post_attention_layernorm: RowNorm


class LlamaBody(Protocol):
    """Module of transformers for a model of `FAMILY`, without its head."""

    embed_tokens: nn.Embedding
    layers: Iterable[LlamaLayer]
    norm: RowNorm
    rotary_emb: RotaryTable


class Mlp:
    """MLP of a layer, gated by SiLU."""

    def __init__(self, mlp: LlamaMlp) -> None:
        self.gate_up, self.down = Product(mlp.gate_proj, mlp.up_proj), mlp.down_proj.product
        self.products = (self.gate_up, self.down)
        self.joined = (self.gate_up,)

    def __call__(self, h: torch.Tensor) -> torch.Tensor:
        """Compute h[N, D] -> [N, D]."""
        return self.down(ops.swiglu(self.gate_up(h)))


class Mixture:
    """Top-k mixture of experts."""

    products: tuple[Product, ...] = ()
    joined: tuple[Product, ...] = ()

    def __init__(self, mlp: LlamaMlp) -> None:
        self.router, self.experts = mlp.gate, mlp.experts

    def __call__(self, h: torch.Tensor) -> torch.Tensor:
        """Compute h[N, D] -> [N, D]."""
        _, shares, chosen = self.router(h)
        y: torch.Tensor = self.experts(h, chosen, shares)
        return y


class Layer:
    """Decoder layer, with the modules of transformers' layer as attributes."""

    def __init__(self, layer: LlamaLayer, index: int) -> None:
        attention = layer.self_attn
        self.index, self.head_dim = index, attention.head_dim
        self.form = AttentionForm(attention.scaling, _window(attention))
        self.heads = [
            projection.out_features // attention.head_dim for projection in (attention.q_proj, attention.k_proj)
        ]
        self.qkv, self.o = Product(attention.q_proj, attention.k_proj, attention.v_proj), attention.o_proj.product
        self.mlp = Mixture(layer.mlp) if hasattr(layer.mlp, "experts") else Mlp(layer.mlp)
        self.products = (self.qkv, self.o, *self.mlp.products)
        self.joined = (self.qkv, *self.mlp.joined)
        self.q_norm: RowNorm | None = getattr(attention, "q_norm", None)
        self.k_norm: RowNorm | None = getattr(attention, "k_norm", None)
        self.input_norm, self.mlp_norm = layer.input_layernorm, layer.post_attention_layernorm
        norms = (self.input_norm, self.q_norm, self.k_norm, self.mlp_norm)
        self.norms = tuple(norm for norm in norms if norm is not None)

    def __call__(
        self,
        x: torch.Tensor,
        y: torch.Tensor | None,
        angles: tuple[torch.Tensor, torch.Tensor],
        attention: Attention,
        rows: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute a layer: residual stream x[N, D] and the pending term y[N, D] -> both after this layer.

        Args:
            y: output of the previous layer, added to x inside the first norm; None in the first layer.
            angles: cosines and sines, [N, d].
            rows: [M] indices of the tokens that are computed after the attention; None for all.
        """
        x, h = add_and_norm(x, y, self.input_norm)
        q, k, v = ops.split_heads(self.qkv(h), *angles, self._head_norms(), *self.heads)
        o = attend(q, k, v, attention, self.index, self.form).flatten(1)
        if rows is not None:
            x, o = take(x, rows), take(o, rows)
        x, h = add_and_norm(x, self.o(o), self.mlp_norm)
        return x, self.mlp(h)

    def _head_norms(self) -> tuple[torch.Tensor, torch.Tensor, float] | None:
        if self.q_norm is None or self.k_norm is None:
            return None
        return self.q_norm.weight, self.k_norm.weight, self.q_norm.variance_epsilon


def _window(attention: LlamaAttention) -> int | None:
    """Return the window of a layer: the config's for Mistral and Mixtral, the layer's own for Qwen, None for Llama."""
    if attention.config.model_type in ("mistral", "mixtral"):
        own: int | None = attention.config.sliding_window
    else:
        own = getattr(attention, "sliding_window", None)
    return own


def add_and_norm(x: torch.Tensor, y: torch.Tensor | None, norm: RowNorm) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x + y (x itself if y is None) and its norm."""
    if y is None:
        return x, ops.rms_norm(x, norm.weight, norm.variance_epsilon)
    return ops.add_rms_norm(x, y, norm.weight, norm.variance_epsilon)


Stream = tuple[torch.Tensor, torch.Tensor | None]
"""Residual stream x[N, D] and the pending term y[N, D] between two layers; None before the first layer."""


class Gatherer(Protocol):
    """Source of a decoder's parameters, which may be sharded: it gathers those of a stage before the stage is computed.
    Stages are the embedding (0), the layers (1 to L), and the final norm with the head (L + 1)."""

    def enter(self, stage: int) -> None:
        """Gather the parameters of a stage. This may overwrite those of the other stages."""
        ...

    def entered(self, stage: int, stream: Stream) -> Stream:
        """Gather a stage's parameters and return its input, whose gradient ends the stage's backward pass."""
        ...

    def left(self, stage: int, stream: Stream) -> Stream:
        """Return the output of a stage; the output's gradient begins the stage's backward pass."""
        ...


class AllThere:
    """Source of parameters that are always in memory. Implements `Gatherer`."""

    def enter(self, stage: int) -> None:
        """Do nothing."""

    def entered(self, stage: int, stream: Stream) -> Stream:
        return stream

    def left(self, stage: int, stream: Stream) -> Stream:
        return stream


class LlamaDecoder:
    """Forward tokens -> hidden states for a module of `FAMILY` whose parts have been swapped."""

    def __init__(self, body: LlamaBody, *, gradient_checkpointing: bool) -> None:
        self.embedding = body.embed_tokens
        self.layers = [Layer(layer, index) for index, layer in enumerate(body.layers)]
        self.norm, self.rotary = body.norm, body.rotary_emb
        self.gradient_checkpointing = gradient_checkpointing
        self.gatherer: Gatherer = AllThere()

    def __call__(
        self, tokens: torch.Tensor, positions: torch.Tensor, attention: Attention, rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Compute tokens[N], positions[N] -> [N, D] after the final norm; with rows[M], only these rows, [M, D].

        The last layer computes keys and values of all tokens, but everything after its attention only for `rows`.
        """
        angles, gatherer = self.rotary.rows(positions), self.gatherer
        gatherer.enter(0)
        embedded = nn.functional.embedding(tokens, self.embedding.weight, self.embedding.padding_idx)
        stream: Stream = (embedded, None)
        recompute = self.gradient_checkpointing and torch.is_grad_enabled()
        for stage, layer in enumerate(self.layers, 1):
            stream = gatherer.entered(stage, stream)
            arguments = (*stream, angles, attention, rows if layer is self.layers[-1] else None)
            stream = checkpoint(layer, *arguments, use_reentrant=False) if recompute else layer(*arguments)
            stream = gatherer.left(stage, stream)
        return add_and_norm(*gatherer.entered(len(self.layers) + 1, stream), self.norm)[1]

    @property
    def kv_heads(self) -> dict[int, ops.KvHeads]:
        """Return the keys and values that each layer stores for a token."""
        return {layer.index: ops.KvHeads(layer.heads[1], layer.head_dim, layer.index) for layer in self.layers}

    @property
    def mixtures(self) -> list[Mixture]:
        """Return the mixtures of the layers that have experts."""
        return [layer.mlp for layer in self.layers if isinstance(layer.mlp, Mixture)]

    @property
    def joined(self) -> list[Product]:
        """Return the joint products of this decoder; the other products belong to their modules."""
        return [product for layer in self.layers for product in layer.joined]
