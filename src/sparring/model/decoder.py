"""Forward of the Llama family (Llama, Mistral, Qwen2, Qwen3, and with experts Mixtral and Qwen3-MoE) over the library's
own modules, without its wrappers.

At small sizes the library's forward spends more time in decorators, masks and caches than in arithmetic. This one walks
the same module objects on flat tokens; a parity test holds it to the untouched library in float64.
N tokens, D width, H query heads, G key/value heads, d head size.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from sparring.kernels import ops
from sparring.kernels.form import AttentionForm
from sparring.model.attention import Attention, attend
from sparring.model.experts import RowExperts, RowRouter
from sparring.model.layers import Product

DENSE = ("llama", "mistral", "qwen2", "qwen3")
FAMILY = (*DENSE, "mixtral", "qwen3_moe")
"""`model_type`s whose decoder layer is this one, and whose numerics are proven by our own tests."""


class Mlp:
    """MLP of a layer, gated by SiLU."""

    def __init__(self, mlp: nn.Module) -> None:
        self.gate_up, self.down = Product(mlp.gate_proj, mlp.up_proj), mlp.down_proj.product
        self.products = (self.gate_up, self.down)
        self.joined = (self.gate_up,)

    def __call__(self, h: torch.Tensor) -> torch.Tensor:
        """Compute h[N, D] -> [N, D]."""
        return self.down(ops.swiglu(self.gate_up(h)))


class Mixture:
    """Experts of a layer, of which every row has a few."""

    products: tuple[Product, ...] = ()
    joined: tuple[Product, ...] = ()

    def __init__(self, mlp: nn.Module) -> None:
        self.router: RowRouter = mlp.gate
        self.experts: RowExperts = mlp.experts

    def __call__(self, h: torch.Tensor) -> torch.Tensor:
        """Compute h[N, D] -> [N, D]."""
        _, shares, chosen = self.router(h)
        return self.experts(h, chosen, shares)


class Layer:
    """Decoder layer: the library's parts, looked up once."""

    def __init__(self, layer: nn.Module, index: int) -> None:
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
        self.q_norm, self.k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
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
        """Compute the layer: the residual stream x[N, D] and the term y[N, D] still to be added to it, or None -> both
        after this layer.

        Args:
            x: the stream.
            y: the output of the layer before, which is added where the norm reads the sum anyway.
            angles: cos and sin, [N, d].
            attention: how the tokens lie.
            rows: [M] of the N that go on behind the attention; None for all.
        """
        x, h = add_and_norm(x, y, self.input_norm)
        q, k, v = ops.split_heads(self.qkv(h), *angles, self._head_norms(), *self.heads)
        o = attend(q, k, v, attention, self.index, self.form).flatten(1)
        if rows is not None:
            x, o = x.index_select(0, rows), o.index_select(0, rows)
        x, h = add_and_norm(x, self.o(o), self.mlp_norm)
        return x, self.mlp(h)

    def _head_norms(self) -> tuple[torch.Tensor, torch.Tensor, float] | None:
        if self.q_norm is None:
            return None
        return self.q_norm.weight, self.k_norm.weight, self.q_norm.variance_epsilon


def _window(attention: nn.Module) -> int | None:
    """Return the window of a layer: Mistral's and Mixtral's have that of the config, Qwen's their own, Llama's none."""
    if attention.config.model_type in ("mistral", "mixtral"):
        return attention.config.sliding_window
    return getattr(attention, "sliding_window", None)


def add_and_norm(x: torch.Tensor, y: torch.Tensor | None, norm: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x + y and its norm; x itself where there is nothing to add."""
    if y is None:
        return x, ops.rms_norm(x, norm.weight, norm.variance_epsilon)
    return ops.add_rms_norm(x, y, norm.weight, norm.variance_epsilon)


class LlamaDecoder:
    """tokens -> hidden states for a module of `FAMILY` whose parts have been swapped."""

    def __init__(self, body: nn.Module, *, gradient_checkpointing: bool) -> None:
        self.embedding = body.embed_tokens
        self.layers = [Layer(layer, index) for index, layer in enumerate(body.layers)]
        self.norm, self.rotary = body.norm, body.rotary_emb
        self.gradient_checkpointing = gradient_checkpointing

    def __call__(
        self, tokens: torch.Tensor, positions: torch.Tensor, attention: Attention, rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Compute tokens[N], positions[N] -> [N, D] after the final norm; with rows[M], only those, [M, D].

        The last layer computes keys and values of all tokens, and behind its attention only what `rows` ask for.
        """
        angles = self.rotary.rows(positions)
        x = nn.functional.embedding(tokens, self.embedding.weight, self.embedding.padding_idx)
        y = None
        recompute = self.gradient_checkpointing and torch.is_grad_enabled()
        for layer in self.layers:
            arguments = (x, y, angles, attention, rows if layer is self.layers[-1] else None)
            x, y = checkpoint(layer, *arguments, use_reentrant=False) if recompute else layer(*arguments)
        return add_and_norm(x, y, self.norm)[1]

    @property
    def kv_heads(self) -> dict[int, ops.KvHeads]:
        """Return what each layer keeps of a token."""
        return {layer.index: ops.KvHeads(layer.heads[1], layer.head_dim, layer.index) for layer in self.layers}

    @property
    def mixtures(self) -> list[Mixture]:
        """Return the mixtures of the layers that have experts."""
        return [layer.mlp for layer in self.layers if isinstance(layer.mlp, Mixture)]

    @property
    def joined(self) -> list[Product]:
        """Return the products that are joined here; the others belong to their modules."""
        return [product for layer in self.layers for product in layer.joined]
