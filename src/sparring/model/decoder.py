"""The forward of the Llama family (Llama, Mistral, Qwen2, Qwen3) over the library's own modules, without its wrappers.

At small sizes the library's forward spends more time in decorators, masks and caches than in arithmetic. This one walks
the same module objects on flat tokens; a parity test holds it to the untouched library in float64.
N tokens, D width, H query heads, G key/value heads, d head size.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from sparring.model.attention import Attention, attend
from sparring.model.kernels import ops
from sparring.model.layers import Product

FAMILY = ("llama", "mistral", "qwen2", "qwen3")
"""`model_type`s whose decoder layer is this one, and whose numerics are proven by our own tests."""


class Layer:
    """One decoder layer: the library's parts, looked up once."""

    def __init__(self, layer: nn.Module, index: int) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.index, self.scale, self.head_dim = index, attention.scaling, attention.head_dim
        self.qkv, self.o = Product(attention.q_proj, attention.k_proj, attention.v_proj), attention.o_proj.product
        self.gate_up, self.down = Product(mlp.gate_proj, mlp.up_proj), mlp.down_proj.product
        self.products = (self.qkv, self.o, self.gate_up, self.down)
        self.q_norm, self.k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
        self.input_norm, self.mlp_norm = layer.input_layernorm, layer.post_attention_layernorm
        norms = (self.input_norm, self.q_norm, self.k_norm, self.mlp_norm)
        self.norms = tuple(norm for norm in norms if norm is not None)

    def __call__(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attention: Attention) -> torch.Tensor:
        """x[N, D] -> [N, D]; cos, sin [N, d]."""
        num_tokens, d = x.shape[0], self.head_dim
        h = ops.rms_norm(x, self.input_norm.weight, self.input_norm.variance_epsilon)
        q, k, v = (part.reshape(num_tokens, -1, d) for part in self.qkv(h).split(self.qkv.sizes, 1))
        if self.q_norm is not None:
            q = ops.rms_norm(q, self.q_norm.weight, self.q_norm.variance_epsilon)
            k = ops.rms_norm(k, self.k_norm.weight, self.k_norm.variance_epsilon)
        o = attend(ops.rope(q, cos, sin), ops.rope(k, cos, sin), v, attention, self.index, self.scale)
        x = x + self.o(o.reshape(num_tokens, -1))
        h = ops.rms_norm(x, self.mlp_norm.weight, self.mlp_norm.variance_epsilon)
        gate, up = self.gate_up(h).split(self.gate_up.sizes, 1)
        return x + self.down(ops.silu_mul(gate, up))

    def refresh(self) -> None:
        """Pack changed weights anew that are joined here; the others are their modules' own."""
        self.qkv.refresh()
        self.gate_up.refresh()


class Decoder:
    """tokens -> hidden states for a module of `FAMILY` whose parts have been swapped."""

    def __init__(self, body: nn.Module, *, gradient_checkpointing: bool) -> None:
        self.embedding = body.embed_tokens
        self.layers = [Layer(layer, index) for index, layer in enumerate(body.layers)]
        self.norm, self.rotary = body.norm, body.rotary_emb
        self.gradient_checkpointing = gradient_checkpointing

    def __call__(self, tokens: torch.Tensor, positions: torch.Tensor, attention: Attention) -> torch.Tensor:
        """tokens[N], positions[N] -> [N, D] after the final norm."""
        cos, sin = self.rotary.rows(positions)
        x = nn.functional.embedding(tokens, self.embedding.weight, self.embedding.padding_idx)
        recompute = self.gradient_checkpointing and torch.is_grad_enabled()
        for layer in self.layers:
            x = checkpoint(layer, x, cos, sin, attention, use_reentrant=False) if recompute else layer(x, cos, sin, attention)
        return ops.rms_norm(x, self.norm.weight, self.norm.variance_epsilon)

    def refresh(self) -> None:
        """Pack changed weights anew that the layers have joined."""
        for layer in self.layers:
            layer.refresh()
