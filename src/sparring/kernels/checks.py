"""Checks of shapes, dtypes and indices before an operation runs: compiled code trusts sizes and offsets.

N rows, K inputs, M outputs, E weights, V vocabulary, H query heads, G key/value heads, d head size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sparring.errors import refusal
from sparring.kernels.truncation import KeptRows

if TYPE_CHECKING:
    from sparring.kernels.packed import PackedStack


def check_logits(where: str, logits: torch.Tensor) -> None:
    """Refuse logits that are not [N, V] float32."""
    if logits.dim() != 2 or logits.dtype is not torch.float32 or logits.shape[1] == 0:
        raise refusal(where, "logits[N, V] float32", f"{tuple(logits.shape)} {logits.dtype}", "cast the logits")


def check_kept(kept: KeptRows, rows: int) -> KeptRows:
    """Return the offsets as int64 and the ids as int32; refuse offsets that do not ascend from 0 to the number of
    ids."""
    offsets, ids = kept[0].to(torch.int64).contiguous(), kept[1].to(torch.int32).contiguous()
    if (
        offsets.shape != (rows + 1,)
        or int(offsets[0])
        or int(offsets[-1]) != len(ids)
        or bool((offsets.diff() < 0).any())
    ):
        given = f"{tuple(offsets.shape)} up to {offsets[-1:].tolist()} of {len(ids)} ids"
        raise refusal(
            "kept", f"offsets [{rows + 1}] that ascend from 0 to the number of ids", given, "see kernels.kept"
        )
    return offsets, ids


def check_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None) -> None:
    """Refuse queries, keys and values that differ in dtype or do not fit, and sinks that are not one per head."""
    many, few = q.shape, k.shape
    fits = len(many) == len(few) == 3 and few == v.shape and many[0] == few[0] and many[2] == few[2]
    if not fits or many[1] % few[1] or not (q.dtype is k.dtype is v.dtype):
        given = f"q {tuple(q.shape)} {q.dtype}, k {tuple(k.shape)} {k.dtype}, v {tuple(v.shape)} {v.dtype}"
        raise refusal("attention", "q[N, H, d], k[N, G, d], v[N, G, d] of one dtype, G dividing H", given, "reshape")
    if sinks is not None and sinks.shape != many[1:2]:
        raise refusal("attention", f"one sink for each of {many[1]} heads", str(tuple(sinks.shape)), "check the model")


def check_shared(cu_seqlens: torch.Tensor, shared: torch.Tensor) -> None:
    """Refuse counts of shared tokens that are not int32 [B], or exceed the length of the preceding sequence."""
    if shared.dtype is not torch.int32 or shared.shape != (cu_seqlens.numel() - 1,):
        given = f"{tuple(shared.shape)} {shared.dtype}"
        raise refusal("shared", f"{cu_seqlens.numel() - 1} int32 counts", given, "one for each sequence")
    if shared.device.type != "cpu":
        return
    lengths = torch.nn.functional.pad(shared + cu_seqlens.diff(), (1, 0))
    if bool(((shared < 0) | (shared > lengths[:-1])).any()):
        raise refusal("shared", "at most the length of the sequence before", str(shared.tolist()), "see batch.prefixes")


def check_groups(x: torch.Tensor, packed: PackedStack, biases: torch.Tensor | None, counts: torch.Tensor) -> None:
    """Refuse weights that do not fit x[N, K], biases other than [E, M], and counts[E] int64 that do not sum to N."""
    experts, outputs = len(packed.matrices), packed.num_outputs
    _check_rows("linear_groups", x, packed)
    if biases is not None and biases.shape != (experts, outputs):
        raise refusal(
            "linear_groups", f"biases [{experts}, {outputs}]", str(tuple(biases.shape)), "one row for each weight"
        )
    if (
        counts.dtype is not torch.int64
        or counts.shape != (experts,)
        or int(counts.min()) < 0
        or int(counts.sum()) != len(x)
    ):
        given = f"{tuple(counts.shape)} {counts.dtype} that sum to {int(counts.sum())}"
        raise refusal(
            "linear_groups", f"{experts} int64 counts that sum to {len(x)}", given, "count the rows of each weight"
        )


def check_chosen(
    x: torch.Tensor, gate_up: PackedStack, down: PackedStack, chosen: torch.Tensor, shares: torch.Tensor
) -> None:
    """Refuse experts whose down [D, I] does not fit gate_up [2 I, D] and x[N, D], and routing other than indices [N, k]
    int32 below E with shares [N, k] float32."""
    _check_rows("mixture", x, gate_up)
    sizes = (len(gate_up.matrices), gate_up.num_inputs, gate_up.num_outputs, gate_up.dtype)
    if (len(down.matrices), down.num_outputs, 2 * down.num_inputs, down.dtype) != sizes:
        given = f"[{len(down.matrices)}, {down.num_outputs}, {down.num_inputs}] {down.dtype}"
        raise refusal(
            "mixture", f"{sizes[0]} weights [{sizes[1]}, {sizes[2] // 2}] {sizes[3]}", given, "check the experts"
        )
    fits = chosen.dim() == 2 and chosen.shape == shares.shape and len(chosen) == len(x) and chosen.shape[1] > 0
    if not fits or chosen.dtype is not torch.int32 or shares.dtype is not torch.float32:
        given = f"{tuple(chosen.shape)} {chosen.dtype} and {tuple(shares.shape)} {shares.dtype}"
        raise refusal("mixture", f"chosen [{len(x)}, k] int32 and shares of that shape, float32", given, "see `route`")
    if len(x) and not 0 <= int(chosen.min()) <= int(chosen.max()) < sizes[0]:
        given = f"{int(chosen.min())} to {int(chosen.max())}"
        raise refusal("mixture", f"experts below {sizes[0]}", given, "see `route`")


def _check_rows(where: str, x: torch.Tensor, packed: PackedStack) -> None:
    if x.dim() != 2 or x.shape[1] != packed.num_inputs or x.dtype is not packed.dtype:
        given = f"{tuple(x.shape)} {x.dtype}"
        raise refusal(where, f"x[N, {packed.num_inputs}] {packed.dtype}", given, "reshape or cast x")
