"""Layout of the tokens of one forward: packed sequences (training) or rows over KV pages (generation).

Shapes: N tokens, B sequences, H query heads, G key/value heads, d head size, P pages per sequence.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from transformers import AttentionInterface

from sparring.errors import refusal
from sparring.kernels import ops
from sparring.kernels.attention_scores import AttentionForm
from sparring.kernels.pages import KvHeads
from sparring.model.rowwise import row_invariant
from sparring.model.states import RecurrentStates

IMPLEMENTATION = "sparring"
"""Name of our attention in transformers' attention interface."""


@dataclass(frozen=True, slots=True)
class Packed:
    """Whole sequences, concatenated. `cu_seqlens[B+1]` int32: sequence b is tokens cu_seqlens[b]:cu_seqlens[b+1].

    With `shared[B]` int32, the tokens of sequence b follow the first shared[b] positions of sequence b - 1: a traversal
    of a tree of prefixes, in which every token is computed once.
    """

    cu_seqlens: torch.Tensor
    shared: torch.Tensor | None = None

    @staticmethod
    def of(lengths: list[int]) -> Packed:
        """Return the layout of sequences of these lengths in tokens."""
        return Packed(torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32))

    def to(self, device: torch.device) -> Packed:
        """Copy the offsets to `device`."""
        return Packed(self.cu_seqlens.to(device), None if self.shared is None else self.shared.to(device))


@dataclass(frozen=True, slots=True)
class Paged:
    """New tokens of B sequences whose earlier keys and values are in pages.

    A layer first writes all new keys and values, then attends, so a row may attend to keys that another sequence of the
    same call writes into a shared page.

    Attributes:
        rows: the new tokens of each sequence and their pages.
        states: recurrent states and the slot [B] int64 of each sequence; None without recurrent layers.
    """

    pages: ops.KvPages
    rows: ops.PagedRows
    states: tuple[RecurrentStates, torch.Tensor] | None = None


@dataclass(frozen=True, slots=True)
class KeyRecording(Packed):
    """Packed sequences whose forward records, in `keys`, the keys and values [1, G, N, d] that each layer attends
    to."""

    keys: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    @property
    def heads(self) -> dict[int, KvHeads]:
        """Return the keys and values that each layer stores. A layer that attends to the tensors of another layer
        stores none."""
        first = {(id(k), id(v)): layer for layer, (k, v) in reversed(self.keys.items())}
        return {layer: KvHeads(k.shape[1], k.shape[3], first[id(k), id(v)]) for layer, (k, v) in self.keys.items()}


Attention = Packed | Paged

CURRENT_ATTENTION: ContextVar[Attention | None] = ContextVar(
    "attention of the library's forward under way", default=None
)
"""Layout of the tokens in this thread's call of transformers. It is a context variable because not every model passes
keywords on to its attention."""


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attention: Attention,
    layer: int,
    form: AttentionForm,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute causal attention of one layer, q[N, H, d], k[N, G, d], v[N, G, d] -> [N, H, d]; a token's bits do not
    depend on the batch. `sinks`[H] is an additional logit per head without a value."""
    if isinstance(attention, Packed):
        return ops.attention_packed(q, k, v, attention.cu_seqlens, form, attention.shared, sinks)
    return ops.attention_paged(q, k, v, attention.pages, layer, attention.rows, form, sinks)


class NumberedLayer(Protocol):
    """Attention layer of transformers, which has its index."""

    layer_idx: int


@row_invariant
def library_attention(
    module: NumberedLayer,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention with the signature of transformers' attention interface: q, k, v are [1, heads, N, d].

    Raises:
        BadInput: the layer needs a feature that our attention does not have.
    """
    context = CURRENT_ATTENTION.get()
    if context is None:
        raise refusal(type(module).__name__, "a call through CausalModel", "another one", "use CausalModel.hidden")
    given = "position_bias" if options.get("position_bias") is not None else None
    given = given if getattr(module, "is_causal", True) else "both directions"
    if given is not None:
        raise refusal(type(module).__name__, "causal attention", f"attention with {given}", "choose another model")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    # some configs write "no window" as 0
    form = AttentionForm(scale, options.get("sliding_window") or None, options.get("softcap") or None)
    q, k, v = (t[0].transpose(0, 1).contiguous() for t in (query, key, value))
    if isinstance(context, KeyRecording):
        context.keys[module.layer_idx] = (key, value)
        if query.is_meta:
            return query.new_empty(1, *query.shape[2:0:-1], value.shape[-1]), None
    size = v.shape[-1]
    if size < q.shape[-1]:
        v = torch.nn.functional.pad(v, (0, q.shape[-1] - size))
    out = attend(q, k, v, context, module.layer_idx, form, options.get("s_aux"))
    return out[..., :size].contiguous().unsqueeze(0), None


AttentionInterface.register(IMPLEMENTATION, library_attention)
