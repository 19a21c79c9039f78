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

FAMILY = ("llama", "mistral", "qwen2", "qwen3")
"""`model_type`s whose decoder layer is this one, and whose numerics are proven by our own tests."""


class Layer:
    """One decoder layer: the library's parts, looked up once."""

    def __init__(self, layer: nn.Module, index: int) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.index, self.scale, self.head_dim = index, attention.scaling, attention.head_dim
        self.q_proj, self.k_proj = attention.q_proj.forward, attention.k_proj.forward
        self.v_proj, self.o_proj = attention.v_proj.forward, attention.o_proj.forward
        self.q_norm, self.k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
        self.gate_proj, self.up_proj, self.down_proj = mlp.gate_proj.forward, mlp.up_proj.forward, mlp.down_proj.forward
        self.input_norm, self.mlp_norm = layer.input_layernorm, layer.post_attention_layernorm

    def __call__(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attention: Attention) -> torch.Tensor:
        """x[N, D] -> [N, D]; cos, sin [N, d]."""
        num_tokens, d = x.shape[0], self.head_dim
        h = ops.rms_norm(x, self.input_norm.weight, self.input_norm.variance_epsilon)
        q, k, v = self.q_proj(h), self.k_proj(h), self.v_proj(h)
        if self.q_norm is not None:
            q = ops.rms_norm(q.view(-1, d), self.q_norm.weight, self.q_norm.variance_epsilon)
            k = ops.rms_norm(k.view(-1, d), self.k_norm.weight, self.k_norm.variance_epsilon)
        q, k = ops.rope(q.view(num_tokens, -1, d), cos, sin), ops.rope(k.view(num_tokens, -1, d), cos, sin)
        o = attend(q, k, v.view(num_tokens, -1, d), attention, self.index, self.scale)
        x = x + self.o_proj(o.reshape(num_tokens, -1))
        h = ops.rms_norm(x, self.mlp_norm.weight, self.mlp_norm.variance_epsilon)
        return x + self.down_proj(ops.silu_mul(self.gate_proj(h), self.up_proj(h)))


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
