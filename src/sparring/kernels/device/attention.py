"""Causal attention on a GPU over packed rows and over pages, forward and backward, in Triton, with a fixed order of
additions.

One forward program serves both: packed rows are pages of one position, and a table maps position p of a sequence to its
row. So training and generation run the same instructions, including sinks, soft caps, windows and trees of prefixes.
Keys are read in blocks that begin at multiples of one length for every query.

Shapes: N rows, H query heads, G key/value heads, d head size, B sequences, L positions.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from sparring.kernels.attention_scores import AttentionForm
from sparring.kernels.device.linear import is_wide

TILE = {torch.bfloat16: 64, torch.float32: 16}
"""Keys of a block, and rows of a tile (query heads of one key/value head times positions). Float32 has no matrix units,
and a larger float32 tile takes minutes to compile."""


class Walk(NamedTuple):
    """Rows and pages of B sequences.

    Attributes:
        tables: [B, P] int32, pages of each sequence in order.
        cu_rows: [B + 1] int32; rows cu_rows[b]:cu_rows[b + 1] are the last positions of sequence b.
        lengths: [B] int32, positions of each sequence.
        most_rows: maximum number of new rows of a sequence.
    """

    tables: torch.Tensor
    cu_rows: torch.Tensor
    lengths: torch.Tensor
    most_rows: int


@triton.jit
def _scores(
    q, k, row_position, key_position, scale, WINDOW: tl.constexpr, CAP: tl.constexpr
):  # fmt: skip
    """Compute scores of a tile [rows, keys], minus infinity for masked ones, and the derivative of the cap."""
    s = tl.dot(q, k, input_precision="ieee") * scale
    slope = tl.full(s.shape, 1.0, tl.float32)
    if CAP > 0:
        # tanh by exp, which every backend has; 1 - 2 / (exp(2x) + 1) is right to the ends
        bent = 1.0 - 2.0 / (tl.exp(2.0 * (s / CAP)) + 1.0)
        slope = 1.0 - bent * bent
        s = bent * CAP
    distance = row_position[:, None] - key_position[None, :]
    hidden = distance < 0
    if WINDOW > 0:
        hidden = hidden | (distance >= WINDOW)
    return tl.where(hidden, float("-inf"), s), slope


@triton.jit
def _tile(
    first, count, length, tile, g, H,
    GROUP: tl.constexpr, PADDED: tl.constexpr, POSITIONS: tl.constexpr,
):  # fmt: skip
    """Return for each row of a query tile its index among N * H queries, head, position, and whether it exists."""
    i = tl.arange(0, PADDED * POSITIONS)
    nth = tile * POSITIONS + i // PADDED
    member = i % PADDED
    head = g * GROUP + member
    return (first + nth).to(tl.int64) * H + head, head, length - count + nth, (nth < count) & (member < GROUP)


@triton.jit
def _keys_of(table, position, valid, g, page_size, page_stride, slot_stride, head_stride):
    page = tl.load(table + position // page_size, mask=valid, other=0).to(tl.int64)
    return page * page_stride + (position % page_size) * slot_stride + g * head_stride


@triton.jit(do_not_specialize=["page_size", "table_width"])
def _forward(
    q, keys, values, tables, cu_rows, lengths, sinks, out, logsumexp,
    H, table_width, page_size, page_stride, slot_stride, head_stride, scale,
    WINDOW: tl.constexpr, CAP: tl.constexpr, SINKS: tl.constexpr, WIDE: tl.constexpr,
    d: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr, POSITIONS: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    tile, g, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = tl.load(cu_rows + b)
    count = tl.load(cu_rows + b + 1) - first
    length = tl.load(lengths + b)
    if tile * POSITIONS < count:
        row, head, position, exists = _tile(first, count, length, tile, g, H, GROUP, PADDED, POSITIONS)
        depth = tl.arange(0, DEPTH)
        queries = tl.load(q + row[:, None] * d + depth[None, :], mask=exists[:, None] & (depth[None, :] < d), other=0.0)
        if WIDE:
            queries = queries.to(tl.float32)
        maximum = tl.full((PADDED * POSITIONS,), float("-inf"), tl.float32)
        total = tl.zeros((PADDED * POSITIONS,), tl.float32)
        if SINKS:
            maximum = tl.load(sinks + head, mask=exists, other=0.0)
            total += 1.0
        weighed = tl.zeros((PADDED * POSITIONS, DEPTH), tl.float32)
        end = tl.minimum(length - count + (tile + 1) * POSITIONS, length)
        begin = 0
        if WINDOW > 0:
            begin = tl.maximum(length - count + tile * POSITIONS - WINDOW + 1, 0) // KEYS * KEYS
        for block in range(begin, end, KEYS):
            at = block + tl.arange(0, KEYS)
            nth = _keys_of(tables + b * table_width, at, at < end, g, page_size, page_stride, slot_stride, head_stride)
            k = tl.load(
                keys + nth[None, :] + depth[:, None], mask=(at[None, :] < end) & (depth[:, None] < d), other=0.0
            )
            v = tl.load(
                values + nth[:, None] + depth[None, :], mask=(at[:, None] < end) & (depth[None, :] < d), other=0.0
            )
            if WIDE:
                k, v = k.to(tl.float32), v.to(tl.float32)
            s, _ = _scores(queries, k, position, at, scale, WINDOW, CAP)
            higher = tl.maximum(maximum, tl.max(s, 1))
            # a block outside a row's window must not change the row
            base = tl.where(higher == float("-inf"), 0.0, higher)
            fade = tl.exp(maximum - base)
            p = tl.exp(s - base[:, None])
            total = total * fade + tl.sum(p, 1)
            weighed = tl.dot(p.to(v.dtype), v, weighed * fade[:, None], input_precision="ieee")
            maximum = higher
        result = (weighed / total[:, None]).to(out.dtype.element_ty)
        tl.store(out + row[:, None] * d + depth[None, :], result, mask=exists[:, None] & (depth[None, :] < d))
        tl.store(logsumexp + row, maximum + tl.log(total), mask=exists)


@triton.jit(do_not_specialize=["page_size", "table_width"])
def _write(
    k, v, keys, values, tables, cu_rows, lengths, table_width, page_size, page_stride, slot_stride, head_stride,
    d: tl.constexpr, DEPTH: tl.constexpr, POSITIONS: tl.constexpr,
):  # fmt: skip
    tile, g, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = tl.load(cu_rows + b)
    count = tl.load(cu_rows + b + 1) - first
    nth = tile * POSITIONS + tl.arange(0, POSITIONS)
    position = tl.load(lengths + b) - count + nth
    valid = nth < count
    target = _keys_of(tables + b * table_width, position, valid, g, page_size, page_stride, slot_stride, head_stride)
    depth = tl.arange(0, DEPTH)
    row = ((first + nth).to(tl.int64) * tl.num_programs(1) + g) * d
    mask = valid[:, None] & (depth[None, :] < d)
    new = row[:, None] + depth[None, :]
    old = target[:, None] + depth[None, :]
    tl.store(keys + old, tl.load(k + new, mask=mask, other=0.0), mask=mask)
    tl.store(values + old, tl.load(v + new, mask=mask, other=0.0), mask=mask)


def _shape(q: torch.Tensor, kv_heads: int) -> dict[str, int]:
    group = q.shape[1] // kv_heads
    padded = triton.next_power_of_2(group)
    sizes = {"d": q.shape[2], "DEPTH": triton.next_power_of_2(q.shape[2])}
    tile = TILE[q.dtype]
    return {**sizes, "GROUP": group, "PADDED": padded, "POSITIONS": max(1, tile // padded), "KEYS": tile}


def _options(form: AttentionForm) -> dict[str, float]:
    return {"WINDOW": form.window or 0, "CAP": form.cap or 0.0}


def _strides(keys: torch.Tensor) -> tuple[int, int, int, int]:
    """Return page size and the strides of page, slot and head of keys [pages, G, page_size, d]."""
    return keys.shape[2], keys.stride(0), keys.stride(2), keys.stride(1)


def attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    walk: Walk,
    form: AttentionForm,
    sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention of q[N, H, d] over keys, values [pages, G, page_size, d] of equal strides -> o[N, H, d],
    logsumexp [N, H] float32."""
    out, logsumexp = torch.empty_like(q), torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    shape = _shape(q, keys.shape[1])
    if walk.most_rows:
        _forward[(-(-walk.most_rows // shape["POSITIONS"]), keys.shape[1], len(walk.lengths))](
            q, keys, values, *walk[:3], sinks, out, logsumexp, q.shape[1], walk.tables.shape[1], *_strides(keys),
            form.scale,
            **_options(form), SINKS=sinks is not None, WIDE=is_wide(q.dtype), **shape,
            num_warps=4, num_stages=2, enable_fp_fusion=False,
        )  # fmt: skip
    return out, logsumexp


def write(k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, walk: Walk) -> None:
    """Write the new rows k, v[N, G, d] to keys, values [pages, G, page_size, d]."""
    shape = {"d": k.shape[2], "DEPTH": triton.next_power_of_2(k.shape[2]), "POSITIONS": 16}
    if walk.most_rows:
        _write[(-(-walk.most_rows // 16), k.shape[1], len(walk.lengths))](
            k, v, keys, values, *walk[:3], walk.tables.shape[1], *_strides(keys), **shape, num_warps=4
        )


@triton.jit(do_not_specialize=["table_width"])
def _backward_queries(
    q, k, v, grad, logsumexp, delta, tables, cu_rows, lengths, dq, H, table_width, slot_stride, head_stride, scale,
    WINDOW: tl.constexpr, CAP: tl.constexpr, WIDE: tl.constexpr,
    d: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr, POSITIONS: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    tile, g, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = tl.load(cu_rows + b)
    count = tl.load(cu_rows + b + 1) - first
    length = tl.load(lengths + b)
    if tile * POSITIONS < count:
        row, _, position, exists = _tile(first, count, length, tile, g, H, GROUP, PADDED, POSITIONS)
        depth = tl.arange(0, DEPTH)
        mask = exists[:, None] & (depth[None, :] < d)
        queries = tl.load(q + row[:, None] * d + depth[None, :], mask=mask, other=0.0)
        slope_out = tl.load(grad + row[:, None] * d + depth[None, :], mask=mask, other=0.0)
        of_row = tl.load(logsumexp + row, mask=exists, other=0.0)
        pull = tl.load(delta + row, mask=exists, other=0.0)
        if WIDE:
            queries, slope_out = queries.to(tl.float32), slope_out.to(tl.float32)
        total = tl.zeros((PADDED * POSITIONS, DEPTH), tl.float32)
        end = tl.minimum(length - count + (tile + 1) * POSITIONS, length)
        begin = 0
        if WINDOW > 0:
            begin = tl.maximum(length - count + tile * POSITIONS - WINDOW + 1, 0) // KEYS * KEYS
        for block in range(begin, end, KEYS):
            at = block + tl.arange(0, KEYS)
            nth = _keys_of(tables + b * table_width, at, at < end, g, 1, slot_stride, 0, head_stride)
            valid = (at[None, :] < end) & (depth[:, None] < d)
            keys = tl.load(k + nth[None, :] + depth[:, None], mask=valid, other=0.0)
            values = tl.load(v + nth[None, :] + depth[:, None], mask=valid, other=0.0)
            if WIDE:
                keys, values = keys.to(tl.float32), values.to(tl.float32)
            s, bend = _scores(queries, keys, position, at, scale, WINDOW, CAP)
            p = tl.exp(s - of_row[:, None])
            ds = p * (tl.dot(slope_out, values, input_precision="ieee") - pull[:, None]) * bend * scale
            total = tl.dot(ds.to(keys.dtype), tl.trans(keys), total, input_precision="ieee")
        tl.store(dq + row[:, None] * d + depth[None, :], total.to(dq.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["table_width"])
def _backward_keys(
    q, k, v, grad, logsumexp, delta, tables, cu_rows, lengths, cu_lengths, dk, dv, H,
    table_width, slot_stride, head_stride,
    scale, WINDOW: tl.constexpr, CAP: tl.constexpr, WIDE: tl.constexpr,
    d: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr, POSITIONS: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """Compute dk, dv [sum of lengths, G, d] float32 for every position of every sequence."""
    block, g, b = tl.program_id(0) * KEYS, tl.program_id(1), tl.program_id(2)
    first = tl.load(cu_rows + b)
    count = tl.load(cu_rows + b + 1) - first
    length = tl.load(lengths + b)
    if block < length:
        depth = tl.arange(0, DEPTH)
        at = block + tl.arange(0, KEYS)
        valid = (at[:, None] < length) & (depth[None, :] < d)
        nth = _keys_of(tables + b * table_width, at, at < length, g, 1, slot_stride, 0, head_stride)
        keys = tl.load(k + nth[:, None] + depth[None, :], mask=valid, other=0.0)
        values = tl.load(v + nth[:, None] + depth[None, :], mask=valid, other=0.0)
        if WIDE:
            keys, values = keys.to(tl.float32), values.to(tl.float32)
        of_keys = tl.zeros((KEYS, DEPTH), tl.float32)
        of_values = tl.zeros((KEYS, DEPTH), tl.float32)
        begin = tl.maximum(block - (length - count), 0) // POSITIONS
        end = (count + POSITIONS - 1) // POSITIONS
        if WINDOW > 0:
            last = block + KEYS - 1 + WINDOW - (length - count)
            end = tl.minimum(end, tl.maximum((last + POSITIONS - 1) // POSITIONS, 0))
        for tile in range(begin, end):
            row, _, position, exists = _tile(first, count, length, tile, g, H, GROUP, PADDED, POSITIONS)
            mask = exists[:, None] & (depth[None, :] < d)
            queries = tl.load(q + row[:, None] * d + depth[None, :], mask=mask, other=0.0)
            slope_out = tl.load(grad + row[:, None] * d + depth[None, :], mask=mask, other=0.0)
            of_row = tl.load(logsumexp + row, mask=exists, other=0.0)
            pull = tl.load(delta + row, mask=exists, other=0.0)
            if WIDE:
                queries, slope_out = queries.to(tl.float32), slope_out.to(tl.float32)
            s, bend = _scores(queries, tl.trans(keys), position, at, scale, WINDOW, CAP)
            p = tl.where(exists[:, None], tl.exp(s - of_row[:, None]), 0.0)
            of_values = tl.dot(tl.trans(p.to(values.dtype)), slope_out, of_values, input_precision="ieee")
            ds = p * (tl.dot(slope_out, tl.trans(values), input_precision="ieee") - pull[:, None]) * bend * scale
            of_keys = tl.dot(tl.trans(ds.to(keys.dtype)), queries, of_keys, input_precision="ieee")
        target = ((tl.load(cu_lengths + b) + at).to(tl.int64) * tl.num_programs(1) + g)[:, None] * d + depth[None, :]
        tl.store(dk + target, of_keys, mask=valid)
        tl.store(dv + target, of_values, mask=valid)


def attend_backward(
    saved: tuple[torch.Tensor, ...], grad: torch.Tensor, walk: Walk, cu_lengths: torch.Tensor, form: AttentionForm
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the gradients of q[N, H, d] and, for every position of every sequence, of k and v (Dao et al. 2022,
    algorithm 4).

    Args:
        saved: q, k, v, out, logsumexp.
        cu_lengths: [B + 1] int32, offset of each sequence in the concatenated positions.

    Returns:
        dq, and dk, dv [sum of lengths, G, d] float32.
    """
    q, k, v, out, logsumexp = saved
    delta = (grad.float() * out.float()).sum(-1)
    shape = {**_shape(q, k.shape[1]), "WIDE": is_wide(q.dtype), **_options(form)}
    dq = torch.empty_like(q)
    positions, longest = int(cu_lengths[-1]), walk.tables.shape[1]
    dk, dv = (torch.zeros(positions, *k.shape[1:], dtype=torch.float32, device=k.device) for _ in range(2))
    common = (q, k, v, grad, logsumexp, delta, *walk[:3])
    sizes = (q.shape[1], longest, k.stride(0), k.stride(1), form.scale)
    launch = {"num_warps": 8, "num_stages": 1, "enable_fp_fusion": False}
    if walk.most_rows:
        tiles = -(-walk.most_rows // shape["POSITIONS"])
        _backward_queries[(tiles, k.shape[1], len(walk.lengths))](*common, dq, *sizes, **shape, **launch)
        blocks = -(-longest // shape["KEYS"])
        _backward_keys[(blocks, k.shape[1], len(walk.lengths))](*common, cu_lengths, dk, dv, *sizes, **shape, **launch)
    return dq, dk, dv
