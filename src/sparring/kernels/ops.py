"""Row-invariant operations: the bits of an output row depend on that row's inputs alone.

The bits do not depend on number of rows, neighbours, threads, packing, or size and position of the pages. The trainer's
forward and the engine call the same functions, so their log-probabilities agree to the bit. Gradients do not depend on
the threads either (`threads`); gradients of weights are sums over rows, and depend on the set of rows.

There are five paths, each with its own bits. CPU: "exact-tiles" (compiled, matrix products on AMX tiles), "exact-pairs"
(compiled, bfloat16 products by pairs), "exact-kernels" (compiled, the same bits on every processor) and "exact-torch"
(without a compiler, slower). GPU: "exact-device". The device of a tensor decides; on the CPU, the setting of the
process.

Shapes: N rows or tokens, D width, K inputs, M outputs, H query heads, G key/value heads, d head size, B sequences, V
vocabulary.
"""

from __future__ import annotations

import math
from ctypes import Structure
from functools import partial

import numpy as np
import torch

from sparring.errors import refusal
from sparring.kernels import gradients
from sparring.kernels.attention_scores import AttentionForm
from sparring.kernels.checks import check_attention, check_kept, check_logits, check_shared
from sparring.kernels.gradients import WeightSum, tracked
from sparring.kernels.mixtures import linear_groups, mixture, route
from sparring.kernels.packed import PackedStack, PackedWeight, pack
from sparring.kernels.pages import BLOCK, KvHeads, KvPages, PagedRows
from sparring.kernels.path import Heads, Norms
from sparring.kernels.paths import (
    fused_path,
    is_compiled,
    path_name,
    path_names,
    path_of,
    transposes_keys,
    use,
    why_not,
)
from sparring.kernels.recomputation import tell
from sparring.kernels.truncation import KeptRows, no_masks

__all__ = [
    "AttentionForm",
    "KvHeads",
    "KvPages",
    "PackedStack",
    "PackedWeight",
    "PagedRows",
    "WeightSum",
    "add_rms_norm",
    "attention_packed",
    "attention_paged",
    "decoder_step",
    "gelu_tanh",
    "is_compiled",
    "linear",
    "linear_groups",
    "mixture",
    "pack",
    "path_name",
    "path_names",
    "rms_norm",
    "rope",
    "route",
    "sample",
    "silu",
    "silu_mul",
    "soft_cap",
    "split_heads",
    "swiglu",
    "token_logprobs",
    "transposes_keys",
    "use",
    "why_not",
]


def linear(
    x: torch.Tensor,
    packed: PackedWeight,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    total: WeightSum | None = None,
) -> torch.Tensor:
    """Compute y = x W^T + bias, x[N, K] -> y[N, M].

    Accumulates in float32; `out_dtype` (default: the dtype of x) is float32 or bfloat16, so a bfloat16 head can return
    float32 logits. Gradients flow to x, to the bias and to `packed.weights`; the gradient of a single weight is added
    to `total` if given.
    """
    if x.dim() != 2 or x.shape[1] != packed.num_inputs or x.dtype is not packed.dtype:
        expected = f"x[N, {packed.num_inputs}] {packed.dtype}"
        raise refusal("linear", expected, f"{tuple(x.shape)} {x.dtype}", "reshape or cast x")
    dtype = x.dtype if out_dtype is None else out_dtype
    if torch.is_grad_enabled() and (
        x.requires_grad or any(w.requires_grad for w in packed.weights) or (bias is not None and bias.requires_grad)
    ):
        y: torch.Tensor = gradients.Linear.apply(x, bias, packed, path_of(x), dtype, total, *packed.weights)
        return y
    return path_of(x).linear(x.contiguous(), packed.storage, bias, packed.num_outputs, dtype)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Compute weight * (x / sqrt(mean(x^2) + eps)) over the last dimension (Zhang and Sennrich 2019, eq. 4), x[..., D],
    weight[D].

    Computed in float32; in bfloat16 the normalised value is rounded before it is multiplied by the weight, as in
    transformers.
    """
    if weight.shape[0] != x.shape[-1] or weight.dtype is not x.dtype:
        given = f"x {tuple(x.shape)} {x.dtype}, weight {tuple(weight.shape)} {weight.dtype}"
        raise refusal("rms_norm", "x[..., D] and weight[D] of one dtype", given, "reshape or cast")
    if x.dim() != 2:
        return rms_norm(x.reshape(-1, x.shape[-1]), weight, eps).view(x.shape)
    x, path = x.contiguous(), path_of(x)
    if not torch.is_grad_enabled() or not (x.requires_grad or weight.requires_grad):
        return path.rms_norm(x, weight, eps)
    compute = partial(path.rms_norm, eps=eps)
    return tell(tracked(compute, partial(path.rms_norm_backward, eps=eps), x, weight), compute, x, weight)


def silu(x: torch.Tensor) -> torch.Tensor:
    """Compute x * sigmoid(x), any shape."""
    x, path = x.contiguous(), path_of(x)
    if torch.is_grad_enabled() and x.requires_grad:
        return tracked(path.silu_mul, path.silu_mul_backward, x, None)
    return path.silu_mul(x, None)


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Compute silu(gate) * up for two tensors of one shape and dtype; float32 inside, rounded once."""
    if gate.shape != up.shape or gate.dtype is not up.dtype:
        raise refusal(
            "silu_mul", "two tensors of one shape and dtype", f"{gate.shape} and {up.shape}", "check the projections"
        )
    gate, up, path = gate.contiguous(), up.contiguous(), path_of(gate)
    if torch.is_grad_enabled() and (gate.requires_grad or up.requires_grad):
        return tracked(path.silu_mul, path.silu_mul_backward, gate, up)
    return path.silu_mul(gate, up)


def soft_cap(x: torch.Tensor, cap: float) -> torch.Tensor:
    """Compute cap * tanh(x / cap), any shape: close to x for small x, bounded by the cap (Gemma 2, 2024, section 2)."""
    return (_tanh(x.float() / cap) * cap).to(x.dtype)


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """Compute x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), any shape (Hendrycks and Gimpel 2016, section 2)."""
    wide = x.float()
    bent = _tanh((wide + wide * wide * wide * 0.044715) * math.sqrt(2.0 / math.pi))
    return (wide * 0.5 * (bent + 1.0)).to(x.dtype)


def _tanh(x: torch.Tensor) -> torch.Tensor:
    x = x.contiguous()
    if torch.is_grad_enabled() and x.requires_grad:
        y: torch.Tensor = gradients.Tanh.apply(x, path_of(x))
        return y
    return path_of(x).tanh(x)


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply the rotary embedding (Su et al. 2021, eq. 34, in the half-split layout): x cos + rotate_half(x) sin.

    x[N, H, d] with even d; cos[N, d] and sin[N, d] of the dtype of x. No gradient to cos and sin.
    """
    shape = x.shape
    if len(shape) != 3 or shape[2] % 2 or cos.shape != (shape[0], shape[2]) or sin.shape != cos.shape:
        given = f"x {tuple(x.shape)}, cos {tuple(cos.shape)}, sin {tuple(sin.shape)}"
        raise refusal("rope", "x[N, H, d] with even d, cos[N, d], sin[N, d]", given, "reshape")
    if cos.dtype is not x.dtype or sin.dtype is not x.dtype:
        cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    x, cos, sin, path = x.contiguous(), cos.contiguous(), sin.contiguous(), path_of(x)
    if not (torch.is_grad_enabled() and x.requires_grad):
        return path.rope(x, cos, sin, False)

    def pull(cos: torch.Tensor, sin: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor]:
        return (path.rope(grad, cos, sin, True),)  # linear in x, so the gradient is the transposed rotation

    return tracked(lambda x: path.rope(x, cos, sin, False), pull, x, saved=(cos, sin))


def add_rms_norm(
    x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x + y and rms_norm(x + y), x[N, D], y[N, D], weight[D]; bitwise equal to the separate operations."""
    if x.dim() != 2 or x.shape != y.shape or weight.shape != x.shape[1:] or not (x.dtype is y.dtype is weight.dtype):
        given = (
            f"x {tuple(x.shape)} {x.dtype}, y {tuple(y.shape)} {y.dtype}, weight {tuple(weight.shape)} {weight.dtype}"
        )
        raise refusal("add_rms_norm", "x[N, D], y[N, D] and weight[D] of one dtype", given, "reshape or cast")
    x, y = x.contiguous(), y.contiguous()
    if torch.is_grad_enabled() and (x.requires_grad or y.requires_grad or weight.requires_grad):
        total, normed = gradients.AddRmsNorm.apply(x, y, weight, eps, path_of(x))
        return total, tell(normed, partial(path_of(x).rms_norm, eps=eps), total, weight)
    return path_of(x).add_rms_norm(x, y, weight, eps)


def split_heads(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    norms: Norms | None,
    num_heads: int,
    num_kv_heads: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split joint queries, keys and values, qkv[N, (H + 2 G) d] -> q[N, H, d], k[N, G, d], v[N, G, d].

    Each head of q and k goes through `rms_norm` (if `norms` are given: weights [d] for q and k, epsilon) and `rope`
    with cos[N, d], sin[N, d], and is bitwise equal to their results. No gradient to cos and sin.
    """
    tokens, size = cos.shape
    fits = qkv.shape == (tokens, (num_heads + 2 * num_kv_heads) * size) and sin.shape == cos.shape and size % 2 == 0
    if not fits or (norms is not None and not all(w.shape == (size,) and w.dtype is qkv.dtype for w in norms[:2])):
        given = f"qkv {tuple(qkv.shape)} {qkv.dtype}, cos {tuple(cos.shape)} for {num_heads} and {num_kv_heads} heads"
        raise refusal("split_heads", "qkv[N, (H + 2 G) d], cos, sin[N, d], norm weights [d]", given, "reshape or cast")
    angles = cos.to(qkv.dtype).contiguous(), sin.to(qkv.dtype).contiguous()
    qkv = qkv if qkv.stride(1) == 1 else qkv.contiguous()
    weights = (None, None) if norms is None else norms[:2]
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (qkv, *weights)):
        shape = (num_heads, num_kv_heads, 0.0 if norms is None else norms[2])
        heads: Heads = gradients.SplitHeads.apply(qkv, *weights, angles, shape, path_of(qkv))
        return heads
    return path_of(qkv).split_heads(qkv, angles, norms, num_heads, num_kv_heads)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """Compute silu(gate) * up (Shazeer 2020, eq. 6) for joint gate and up, gate_up[N, 2 I] -> [N, I]; bitwise equal to
    `silu_mul`."""
    if gate_up.dim() != 2 or gate_up.shape[1] % 2:
        raise refusal("swiglu", "gate_up[N, 2 I]", str(tuple(gate_up.shape)), "check the projections")
    gate_up = gate_up if gate_up.stride(1) == 1 else gate_up.contiguous()
    path = path_of(gate_up)
    if torch.is_grad_enabled() and gate_up.requires_grad:
        y = tracked(path.swiglu, lambda gate_up, grad: (path.swiglu_backward(gate_up, grad),), gate_up)
        return tell(y, path.swiglu, gate_up)
    return path.swiglu(gate_up)


def attention_packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    form: AttentionForm,
    shared: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute causal attention within each packed sequence; q[N, H, d], k[N, G, d], v[N, G, d] -> [N, H, d].

    cu_seqlens[B + 1] int32: sequence b is rows cu_seqlens[b]:cu_seqlens[b + 1]; cu_seqlens starts at 0 and ends at N.
    With shared[B] int32 these rows follow the first shared[b] positions of sequence b - 1, which may themselves be
    shared: a traversal of a tree of prefixes, in which every row is stored once. The result is bitwise equal to that of
    complete sequences. Query head h reads key/value head h // (H / G), with the settings of `form`; sinks[H] are an
    additional logit of each head's softmax, without a value. Accumulates in float32.
    """
    check_attention(q, k, v, sinks)
    # not checked on a device: each layer would wait for it
    if cu_seqlens.dtype is not torch.int32 or (q.device.type == "cpu" and cu_seqlens[-1] != q.shape[0]):
        given = f"{cu_seqlens.dtype} ending at {int(cu_seqlens[-1])}"
        raise refusal("cu_seqlens", f"int32 offsets that end at {q.shape[0]}", given, "see Packed.of")
    if shared is not None:
        check_shared(cu_seqlens, shared)
        shared = shared.contiguous()
    size = q.shape[2]
    q, k, v = _padded(q), _padded(k), _padded(v)
    sinks = None if sinks is None else sinks.float().contiguous()
    out: torch.Tensor
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (q, k, v, sinks)):
        out = gradients.AttentionPacked.apply(q, k, v, sinks, (cu_seqlens.contiguous(), shared), form, path_of(q))
    else:
        out, _ = path_of(q).attention_packed(q, k, v, cu_seqlens.contiguous(), form, shared, sinks)
    return out if out.shape[2] == size else out[..., :size]


def attention_paged(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pages: KvPages,
    layer: int,
    rows: PagedRows,
    form: AttentionForm,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Write the new keys and values of one layer into their pages, then attend. The result is bitwise equal to that of
    `attention_packed`.

    q[N, H, d], k[N, G, d], v[N, G, d] -> [N, H, d], without gradients. `rows`: see `PagedRows`. All rows are written
    before any is read.

    Raises:
        BadInput: a block table names a page that does not exist or is too short for its context length.
    """
    check_attention(q, k, v, sinks)
    num_heads, head_dim, _ = pages.heads[layer]
    if k.shape[1:] != (num_heads, head_dim) or k.dtype is not pages.dtype:
        given = f"{tuple(k.shape)} {k.dtype}"
        raise refusal("attention_paged", f"k[N, {num_heads}, {head_dim}] {pages.dtype}", given, "check the pages")
    size = q.shape[2]
    tables, cu_rows, lengths = rows.block_tables, rows.cu_rows, rows.context_lengths
    if not (tables.dtype is cu_rows.dtype is lengths.dtype is torch.int32):
        raise refusal("attention_paged", "int32 rows", f"{tables.dtype}, {cu_rows.dtype}, {lengths.dtype}", "cast them")
    where = PagedRows(tables.contiguous(), cu_rows.contiguous(), lengths.contiguous(), rows.most_rows)
    sinks = None if sinks is None else sinks.detach().float().contiguous()
    out, bad = path_of(q).attention_paged(_padded(q), _padded(k), _padded(v), pages.layers[layer], where, form, sinks)
    if bad >= 0:
        given = f"{tables[bad].tolist()} for {int(lengths[bad])} tokens"
        expected = f"a table over {pages.num_pages} pages of {pages.page_size} that holds its context"
        raise refusal(f"attention_paged: sequence {bad}", expected, given, "allocate pages before the call")
    return out if out.shape[2] == size else out[..., :size]


def token_logprobs(
    logits: torch.Tensor,
    targets: torch.Tensor,
    temperature: torch.Tensor,
    kept: KeptRows | None = None,
    *,
    spent: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the log-probability of each target and the entropy of each row under softmax(logits / temperature), both
    [N] float32.

    logits[N, V] float32, targets[N] int64, temperature[N] float32 (0 means greedy: computed at temperature 1). The
    softmax of a row is over its `kept` ids, if it has any. Both results have gradients to the logits. `spent`: the
    logits have no other reader, so the backward pass, which then runs only once, may overwrite them with their
    gradient.

    Raises:
        BadInput: a target is outside the vocabulary or not among the kept ids, or kept ids do not ascend within it.
    """
    check_logits("token_logprobs", logits)
    logits, targets = logits.contiguous(), targets.to(torch.int64).contiguous()
    temperature = temperature.to(torch.float32).contiguous()
    if not targets.shape == temperature.shape == logits.shape[:1]:
        given = f"targets {tuple(targets.shape)}, temperature {tuple(temperature.shape)}"
        raise refusal(
            "token_logprobs", f"{logits.shape[0]} targets and temperatures", given, "one for each row of logits"
        )
    if kept is not None:
        kept = check_kept(kept, len(targets))
    if torch.is_grad_enabled() and logits.requires_grad:
        inputs = (logits, targets, temperature, kept)
        logprob, entropy, bad = gradients.TokenLogprobs.apply(*inputs, path_of(logits), spent)
    else:
        (logprob, entropy, _, _), bad = path_of(logits).token_logprobs(logits, targets, temperature, kept)
    if bad >= 0:
        if kept is not None and 0 <= int(targets[bad]) < logits.shape[1]:
            given = f"{int(targets[bad])} and {kept[1][int(kept[0][bad]) : int(kept[0][bad + 1])].tolist()[:20]}"
            raise refusal(
                f"target of row {bad}",
                "one of its kept ids, which ascend",
                given,
                "pass the set that was sampled from",
            )
        raise refusal(
            f"target of row {bad}", f"a token below {logits.shape[1]}", str(int(targets[bad])), "check the vocabulary"
        )
    return logprob, entropy


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    limited: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, np.ndarray | None]:
    """Sample one token for each row of logits[N, V] float32: tokens[N] int64, logprobs[N] float32, and masks[N, W] of
    the ids that each token was drawn from (see `truncation`): no bit in an untruncated row; None without truncation.

    Inverse transform of one uniform number, Philox4x32-10 (Salmon et al. 2011) with key `seeds[n]` (64 bits) and
    counter `positions[n]`. Temperature 0 takes the largest logit (ties by id) and truncates nothing. Otherwise, at that
    temperature, with ties by id: the top_k most likely tokens; among these the shortest prefix that holds top_p of
    their total; among these the ones with at least min_p of the most likely one's probability. top_k[n] <= 0, top_p[n]
    >= 1 and min_p[n] <= 0 truncate nothing. In a row with limited[n], the logits of forbidden tokens are minus
    infinity, and the allowed tokens are recorded as a kept set even without other truncation. The log-probability is
    taken under the sampling distribution, equal to the bit to `token_logprobs` with the kept ids.
    """
    check_logits("sample", logits)
    if seeds.dtype not in (torch.int64, torch.uint64):
        raise refusal("sample", "seeds of 64 bits", str(seeds.dtype), "cast them")
    requests = (
        temperature.to(torch.float32).contiguous(),
        top_k.to(torch.int64).contiguous(),
        top_p.to(torch.float32).contiguous(),
        min_p.to(torch.float32).contiguous(),
        seeds.contiguous().view(torch.int64),
        positions.to(torch.int64).contiguous(),
        temperature.new_zeros(len(logits), dtype=torch.uint8)
        if limited is None
        else limited.to(torch.uint8).contiguous(),
    )
    if any(request.shape != logits.shape[:1] for request in requests):
        given = str([(tuple(r.shape), r.dtype) for r in requests])
        raise refusal("sample", f"seven vectors of {logits.shape[0]}", given, "one value for each row of logits")
    _, top_k, top_p, min_p, _, _, limits = requests
    truncating = bool(((top_k > 0) | (top_p < 1) | (min_p > 0) | (limits > 0)).any())
    masks = no_masks(*logits.shape) if truncating else None
    return *path_of(logits).sample(logits.contiguous(), requests, masks), masks


def decoder_step(plan: Structure, step: Structure, dtype: torch.dtype) -> int:
    """Compute the steps of a `DecoderPlan` and a `StepPlan` in one call (`model.steps.compiled` fills them). Return -1,
    or the index of the first invalid sequence, or -2 - n for an invalid row n."""
    fused = fused_path()
    if fused is None:
        raise refusal("decoder_step", "the compiled kernels", path_name(), "compute operation by operation")
    return fused.decoder_step(plan, step, dtype)


def _padded(x: torch.Tensor) -> torch.Tensor:
    """Pad the head size to a multiple of 16 with zeros, which do not change a score."""
    if x.shape[2] % BLOCK:
        x = torch.nn.functional.pad(x, (0, -x.shape[2] % BLOCK))
    return x.contiguous()
