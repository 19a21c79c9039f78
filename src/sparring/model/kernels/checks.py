"""What operations refuse before anything is computed: compiled code reads what sizes and offsets say.

N rows, K inputs, M outputs, E weights, V vocabulary, H query heads, G key/value heads, d head size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sparring.errors import refusal
from sparring.model.kernels.kept import KeptRows


def check_logits(where: str, logits: torch.Tensor) -> None:
    """Logits of rows, float32."""
    if logits.dim() != 2 or logits.dtype is not torch.float32 or logits.shape[1] == 0:
        raise refusal(where, "logits[N, V] float32", f"{tuple(logits.shape)} {logits.dtype}", "cast the logits")


def checked(kept: KeptRows, rows: int) -> KeptRows:
    """Offsets that say where in the ids each row's are: C reads what they say."""
    offsets, ids = kept[0].to(torch.int64).contiguous(), kept[1].to(torch.int32).contiguous()
    if offsets.shape != (rows + 1,) or int(offsets[0]) or int(offsets[-1]) != len(ids) or bool((offsets.diff() < 0).any()):
        got = f"{tuple(offsets.shape)} up to {offsets[-1:].tolist()} of {len(ids)} ids"
        raise refusal("kept", f"offsets [{rows + 1}] that ascend from 0 to the number of ids", got, "see kernels.kept")
    return offsets, ids


def check_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None) -> None:
    """Queries, keys and values of one dtype that fit each other, and one sink for each head."""
    many, few = q.shape, k.shape
    fits = len(many) == len(few) == 3 and few == v.shape and many[0] == few[0] and many[2] == few[2]
    if not fits or many[1] % few[1] or not (q.dtype is k.dtype is v.dtype):
        got = f"q {tuple(q.shape)} {q.dtype}, k {tuple(k.shape)} {k.dtype}, v {tuple(v.shape)} {v.dtype}"
        raise refusal("attention", "q[N, H, d], k[N, G, d], v[N, G, d] of one dtype, G dividing H", got, "reshape")
    if sinks is not None and sinks.shape != many[1:2]:
        raise refusal("attention", f"one sink for each of {many[1]} heads", str(tuple(sinks.shape)), "check the model")


def check_shared(cu_seqlens: torch.Tensor, shared: torch.Tensor) -> None:
    """Counts of tokens that sequences share with the one before, no more than it has."""
    if shared.dtype is not torch.int32 or shared.shape != (cu_seqlens.numel() - 1,):
        got = f"{tuple(shared.shape)} {shared.dtype}"
        raise refusal("shared", f"{cu_seqlens.numel() - 1} int32 counts", got, "one for each sequence")
    if shared.device.type != "cpu":
        return
    lengths = torch.nn.functional.pad(shared + cu_seqlens.diff(), (1, 0))
    if bool(((shared < 0) | (shared > lengths[:-1])).any()):
        raise refusal("shared", "at most the length of the sequence before", str(shared.tolist()), "see batch.prefixes")


def check_groups(
    x: torch.Tensor, kinds: Sequence[tuple[int, int, torch.dtype]], biases: torch.Tensor | None, counts: torch.Tensor
) -> None:
    """Weights of one kind (M, K, dtype) that fits x[N, K], biases[E, M], and int64 counts[E] of rows, N together."""
    same, (outputs, inputs, dtype) = len(set(kinds)) == 1, kinds[0]
    if not same or x.dim() != 2 or x.shape[1] != inputs or x.dtype is not dtype:
        got = f"x {tuple(x.shape)} {x.dtype} and weights {sorted(set(map(str, kinds)))}"
        raise refusal("linear_groups", "x[N, K] and weights [M, K] of one shape and dtype", got, "reshape or cast x")
    if biases is not None and biases.shape != (len(kinds), outputs):
        raise refusal("linear_groups", f"biases [{len(kinds)}, {outputs}]", str(tuple(biases.shape)), "one row for each weight")
    if counts.dtype is not torch.int64 or counts.shape != (len(kinds),) or int(counts.min()) < 0 or int(counts.sum()) != len(x):
        got = f"{tuple(counts.shape)} {counts.dtype} that sum to {int(counts.sum())}"
        raise refusal("linear_groups", f"{len(kinds)} int64 counts that sum to {len(x)}", got, "count the rows of each weight")
