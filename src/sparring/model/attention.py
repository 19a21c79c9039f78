"""Layout of the tokens of one forward: packed sequences (training) or rows over KV pages (generation).

Shapes: N tokens, B sequences, H query heads, G key/value heads, d head size, P pages per sequence.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AttentionInterface

from sparring.errors import refusal
from sparring.kernels import ops
from sparring.kernels.form import AttentionForm
from sparring.kernels.pages import KvHeads
from sparring.model.rowwise import row_invariant
from sparring.model.states import RecurrentStates

IMPLEMENTATION = "sparring"
"""The name under which the library's attention interface knows our attention."""


@dataclass(frozen=True, slots=True)
class Packed:
    """Whole sequences end to end. `cu_seqlens[B+1]` int32: sequence b is tokens cu_seqlens[b]:cu_seqlens[b+1].

    With `shared[B]` int32 these tokens follow the first shared[b] positions of sequence b - 1: a walk through a tree of
    prefixes, in which every token stands once and is computed once.
    """

    cu_seqlens: torch.Tensor
    shared: torch.Tensor | None = None

    @staticmethod
    def of(lengths: list[int]) -> Packed:
        """Return offsets for sequences of these lengths in tokens."""
        return Packed(torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32))

    def to(self, device: torch.device) -> Packed:
        """Copy the offsets to `device`."""
        return Packed(self.cu_seqlens.to(device), None if self.shared is None else self.shared.to(device))


@dataclass(frozen=True, slots=True)
class Paged:
    """New tokens of B sequences whose earlier keys and values lie in `pages`; `rows` says which and where. `states`: of
    a recurrent model, where the sequences' states are kept and in which slots [B] int64.

    A layer first writes all new keys and values, then attends, so a row may attend to what another sequence of the same
    call writes into a page that both share.
    """

    pages: ops.KvPages
    rows: ops.PagedRows
    states: tuple[RecurrentStates, torch.Tensor] | None = None


@dataclass(frozen=True, slots=True)
class KeyRecording(Packed):
    """Packed sequences whose forward records, in `keys`, the keys and values [1, G, N, d] that each layer attends
    with."""

    keys: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    @property
    def heads(self) -> dict[int, KvHeads]:
        """Return what each layer has to keep. A layer that attends with the very tensors of another keeps nothing of
        its own."""
        first = {(id(k), id(v)): layer for layer, (k, v) in reversed(self.keys.items())}
        return {layer: KvHeads(k.shape[1], k.shape[3], first[id(k), id(v)]) for layer, (k, v) in self.keys.items()}


Attention = Packed | Paged

CURRENT_ATTENTION: ContextVar[Attention | None] = ContextVar(
    "attention of the library's forward under way", default=None
)
"""Layout of the tokens in this thread's call of the library. It is passed here because not every model hands keywords
on to its attention."""


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attention: Attention,
    layer: int,
    form: AttentionForm,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute causal attention of one layer, the same bits for a token however it is batched.

    Args:
        q: [N, H, d].
        k: [N, G, d].
        v: [N, G, d].
        attention: where the tokens lie.
        layer: index of the layer, for the pages.
        form: how its scores become weights.
        sinks: [H], one more logit per head that weighs nothing.

    Returns:
        [N, H, d].
    """
    if isinstance(attention, Packed):
        return ops.attention_packed(q, k, v, attention.cu_seqlens, form, attention.shared, sinks)
    return ops.attention_paged(q, k, v, attention.pages, layer, attention.rows, form, sinks)


@row_invariant
def library_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attend in the form that the library's attention interface calls: q, k, v are [1, heads, N, d].

    Raises:
        BadInput: the layer asks for something that our attention does not compute.
    """
    context = CURRENT_ATTENTION.get()
    if context is None:
        raise refusal(type(module).__name__, "a call through CausalModel", "another one", "use CausalModel.hidden")
    got = "position_bias" if options.get("position_bias") is not None else None
    got = got if getattr(module, "is_causal", True) else "both directions"
    if got is not None:
        raise refusal(type(module).__name__, "causal attention", f"attention with {got}", "choose another model")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    # some configs write "no window" as 0
    form = AttentionForm(scale, options.get("sliding_window") or None, options.get("softcap") or None)
    q, k, v = (t[0].transpose(0, 1).contiguous() for t in (query, key, value))
    if isinstance(context, KeyRecording):
        context.keys[module.layer_idx] = (key, value)
    size = v.shape[-1]
    if size < q.shape[-1]:
        v = torch.nn.functional.pad(v, (0, q.shape[-1] - size))
    out = attend(q, k, v, context, module.layer_idx, form, options.get("s_aux"))
    return out[..., :size].contiguous().unsqueeze(0), None


AttentionInterface.register(IMPLEMENTATION, library_attention)
