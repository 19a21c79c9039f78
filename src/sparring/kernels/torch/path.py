"""Operations in plain torch, for machines without a compiler: slower, with their own bits, and row-invariant too.

torch picks its kernels by shape, so every matrix product here has one shape for every batch: rows go through in tiles
of a fixed count, padded with zeros, and keys in blocks of 16 positions. The position of an attention row determines its
slot in a tile. Signatures and shapes as in `kernels.path`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import torch

from sparring.kernels.attention_scores import AttentionForm
from sparring.kernels.memory import zeros
from sparring.kernels.pages import PagedRows
from sparring.kernels.path import Angles, Heads, Norms, SamplingRows, SavedAttention, SavedLogprobs
from sparring.kernels.threads import one_thread
from sparring.kernels.torch.operations import TorchOperations, elementwise_exp, logits_gradient, row_sum, separate_heads
from sparring.kernels.truncation import KeptRows

NAME = "exact-torch"
ROWS = 16
COLUMNS = 64
KEYS = 16


class TorchPath(TorchOperations):
    """All operations in plain torch, on the CPU. Implements `KernelPath`."""

    name = NAME
    is_compiled = False
    transposes_keys = True

    def pack(self, weights: Sequence[torch.Tensor], storage: torch.Tensor | None) -> torch.Tensor:
        """Transpose weights[M_i, K], joined to [M, K] -> float32 [K, ceil(M / 64) * 64], zeros in the columns past M.

        A product with a multiple of 64 columns gives the same bits on any number of threads; for other numbers, MKL on
        some processors computes the columns at the border between two threads differently.
        """
        counts = [len(weight) for weight in weights]
        if storage is None:
            shape, dtype = self.packed_layout(counts, weights[0].shape[1], weights[0].dtype)
            storage = zeros(shape, dtype)
        for weight, columns in zip(weights, storage[:, : sum(counts)].split(counts, 1), strict=True):
            columns.copy_(weight.detach().t())
        return storage

    def packed_layout(
        self, counts: Sequence[int], depth: int, dtype: torch.dtype
    ) -> tuple[tuple[int, ...], torch.dtype]:
        return (depth, -(-sum(counts) // COLUMNS) * COLUMNS), torch.float32

    def linear(
        self, x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, num_outputs: int, dtype: torch.dtype
    ) -> torch.Tensor:
        num_rows = x.shape[0]
        padded = torch.nn.functional.pad(x.float(), (0, 0, 0, -num_rows % ROWS))
        y = torch.empty(padded.shape[0], packed.shape[1])
        for first in range(0, padded.shape[0], ROWS):
            torch.mm(padded[first : first + ROWS], packed, out=y[first : first + ROWS])
        y = y[:num_rows, :num_outputs]
        return (y.contiguous() if bias is None else y + bias.detach().float()).to(dtype)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return weight * (x.float() * self._inverse_rms(x, eps)).to(x.dtype)

    def add_rms_norm(
        self, x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = x + y
        return total, self.rms_norm(total, weight, eps)

    def split_heads(self, qkv: torch.Tensor, angles: Angles, norms: Norms | None, heads: int, kv_heads: int) -> Heads:
        q, k, v = separate_heads(qkv, heads, kv_heads, angles[0].shape[1])
        if norms is not None:
            q, k = (
                self.rms_norm(t.flatten(0, 1), w, norms[2]).view(t.shape) for t, w in ((q, norms[0]), (k, norms[1]))
            )
        return self.rope(q, *angles, False), self.rope(k, *angles, False), v

    def swiglu(self, gate_up: torch.Tensor) -> torch.Tensor:
        return self.silu_mul(*gate_up.chunk(2, 1))

    def attention_packed(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens: torch.Tensor,
        form: AttentionForm,
        shared: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, logsumexp = torch.empty_like(q), torch.empty(q.shape[:2])
        for own, path in _sequences(cu_seqlens, shared):
            out[own], logsumexp[own] = _attend(q[own], k[path], v[path], form, sinks)
        return out, logsumexp

    def attention_packed_backward(self, saved: SavedAttention, grad: torch.Tensor, form: AttentionForm) -> Heads:
        q, k, v, cu_seqlens, shared, out, logsumexp = saved
        dq, dk, dv = (torch.zeros(t.shape) for t in (q, k, v))
        for own, path in _sequences(cu_seqlens, shared):
            piece = [t.float().transpose(0, 1) for t in (q[own], k[path], v[path], out[own], grad[own])]
            with one_thread():
                parts = _attend_backward(piece, logsumexp[own].t(), form)
            dq[own], of_keys, of_values = (part.transpose(0, 1) for part in parts)
            dk.index_add_(0, path, of_keys)
            dv.index_add_(0, path, of_values)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)

    def attention_paged(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        pages: tuple[torch.Tensor, torch.Tensor],
        rows: PagedRows,
        form: AttentionForm,
        sinks: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, int]:
        keys, values = pages
        num_pages, heads, size, depth = values.shape
        tables, (offsets, lengths) = rows[0].to(torch.int64), (t.tolist() for t in rows[1:3])
        for b, length in enumerate(lengths):
            table = tables[b, : -(-length // size)]
            fits = 0 <= offsets[b + 1] - offsets[b] <= length <= tables.shape[1] * size
            if not fits or bool(((table < 0) | (table >= num_pages)).any()):
                return q, b
        for b, length in enumerate(lengths):
            new = slice(offsets[b], offsets[b + 1])
            positions = torch.arange(length - (new.stop - new.start), length)
            page, slot = tables[b, positions // size], positions % size
            keys[page, :, slot // KEYS, :, slot % KEYS] = k[new]
            values[page, :, slot] = v[new]
        out = torch.empty_like(q)
        for b, length in enumerate(lengths):
            new = slice(offsets[b], offsets[b + 1])
            table = tables[b, : -(-length // size)]
            past_k = keys[table].permute(0, 2, 4, 1, 3).reshape(-1, heads, depth)[:length]
            past_v = values[table].transpose(1, 2).reshape(-1, heads, depth)[:length]
            if new.stop > new.start:
                out[new], _ = _attend(q[new], past_k, past_v, form, sinks)
        return out, -1

    def token_logprobs(
        self, logits: torch.Tensor, targets: torch.Tensor, temperature: torch.Tensor, kept: KeptRows | None = None
    ) -> tuple[tuple[torch.Tensor, ...], int]:
        if kept is not None:
            return self._kept_logprobs(logits, targets, temperature, kept)
        wrong = (targets < 0) | (targets >= logits.shape[1])
        if bool(wrong.any()):
            return (logits[:, 0],) * 4, int(wrong.int().argmax())
        z, maximum, weights, log_sum = _statistics(logits, temperature)
        logprob = z.gather(1, targets.unsqueeze(1))[:, 0] - maximum - log_sum
        shifted = torch.where(weights > 0, z - maximum.unsqueeze(1), 0.0)
        entropy = log_sum - row_sum(weights * shifted) / row_sum(weights)
        return (logprob, entropy, maximum, log_sum), -1

    def _kept_logprobs(
        self, logits: torch.Tensor, targets: torch.Tensor, temperature: torch.Tensor, kept: KeptRows
    ) -> tuple[tuple[torch.Tensor, ...], int]:
        """Compute `token_logprobs` with kept ids: the logits of a row's kept ids are computed as a row of their own."""
        results = torch.empty(4, len(targets))
        for n, ids in _limits(kept):
            target, narrow = targets[n : n + 1], logits[n : n + 1]
            if ids is not None:
                sound = bool((ids.diff() > 0).all()) and int(ids[0]) >= 0 and int(ids[-1]) < logits.shape[1]
                target = (ids == target).nonzero()[:, 0]
                if not sound or not len(target):
                    return tuple(results.unbind(0)), n
                narrow = narrow[:, ids]
            values, bad = self.token_logprobs(narrow, target, temperature[n : n + 1])
            if bad >= 0:
                return tuple(results.unbind(0)), n
            results[:, n] = torch.cat(values)
        return tuple(results.unbind(0)), -1

    def token_logprobs_backward(
        self,
        saved: SavedLogprobs,
        grad_logprob: torch.Tensor,
        grad_entropy: torch.Tensor | None,
        kept: KeptRows | None = None,
        *,
        spent: bool = False,
    ) -> torch.Tensor:
        if kept is not None:
            wide = torch.zeros_like(saved[0])
            for n, ids in _limits(kept):
                selection = slice(None) if ids is None else ids
                logits, targets, temperature, entropy, maximum, log_sum = (t[n : n + 1] for t in saved)
                target = targets if ids is None else (ids == targets).nonzero()[:, 0]
                by_entropy = None if grad_entropy is None else grad_entropy[n : n + 1]
                narrow = (logits[:, selection], target, temperature, entropy, maximum, log_sum)
                wide[n, selection] = self.token_logprobs_backward(narrow, grad_logprob[n : n + 1], by_entropy)[0]
            return wide
        return logits_gradient(saved, grad_logprob, grad_entropy)

    def sample(
        self, logits: torch.Tensor, requests: SamplingRows, masks: np.ndarray | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        temperature, top_k, top_p, min_p, seeds, positions, limited = requests
        vocabulary = logits.shape[1]
        tokens, limits = torch.empty(logits.shape[0], dtype=torch.int64), []
        greedy, columns = (temperature == 0).tolist(), zip(top_k.tolist(), top_p.tolist(), min_p.tolist(), strict=True)
        _, _, weights, _ = _statistics(logits, temperature)
        for n, (k, p, least) in enumerate(columns):
            limits.append(torch.empty(0, dtype=torch.int64))
            if greedy[n]:
                tokens[n] = (logits[n] == logits[n].max()).nonzero()[0, 0]
                continue
            u = uniform(int(seeds[n]), int(positions[n]))
            if (k <= 0 or k >= vocabulary) and p >= 1.0 and least <= 0 and not limited[n]:
                possible = weights[n].nonzero()[:, 0]
                tokens[n] = possible[_invert(weights[n][possible].double(), u)]
                continue
            ids = limits[n] = _keep(logits[n], weights[n].double(), (k, p, least))
            _, _, narrow, _ = _statistics(logits[n : n + 1, ids], temperature[n : n + 1])
            tokens[n] = ids[_invert(narrow[0].double(), u)]
            if masks is not None:
                words, bits = np.divmod(ids.numpy(), 64)
                np.bitwise_or.at(masks[n], words, np.uint64(1) << bits.astype(np.uint64))
        counts = torch.tensor([0, *map(len, limits)])
        kept = (counts.cumsum(0), torch.cat(limits)) if counts.any() else None
        (logprobs, *_), _ = self.token_logprobs(logits, tokens, temperature, kept)
        return tokens, logprobs


def walks(cu_seqlens: torch.Tensor, shared: torch.Tensor | None) -> Iterator[torch.Tensor]:
    """Yield, for each sequence, the rows [L] of all its positions."""
    offsets = cu_seqlens.tolist()
    counts = [0] * (len(offsets) - 1) if shared is None else shared.tolist()
    path = torch.empty(0, dtype=torch.int64)
    for begin, end, count in zip(offsets, offsets[1:], counts, strict=False):
        path = torch.cat((path[:count], torch.arange(begin, end)))
        yield path


def _sequences(cu_seqlens: torch.Tensor, shared: torch.Tensor | None) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield, for each sequence with rows of its own, these rows and the rows [L] of all its positions."""
    bounds = pairwise(cu_seqlens.tolist())
    for (begin, end), path in zip(bounds, walks(cu_seqlens, shared), strict=True):
        if end > begin:
            yield slice(begin, end), path


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, form: AttentionForm, sinks: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention of the last len(q) positions of one sequence over k, v[L, G, d], in tiles of 16 by 16 keys."""
    count, heads, size = q.shape
    length, kv_heads = k.shape[:2]
    begin, end = (length - count) // ROWS * ROWS, -(-length // ROWS) * ROWS
    wide_q = torch.zeros(end - begin, heads, size)
    wide_q[length - count - begin : length - begin] = q.float()
    wide_q = wide_q.view(-1, ROWS, kv_heads, heads // kv_heads, size).permute(0, 2, 3, 1, 4)
    wide_k, wide_v = (torch.zeros(end, kv_heads, size).index_copy_(0, torch.arange(length), t.float()) for t in (k, v))
    wide_sinks = None if sinks is None else sinks.repeat_interleave(ROWS).view(kv_heads, -1)
    outs, sums = [], []
    for tile, queries in enumerate(wide_q):
        where = (form, wide_sinks, begin + tile * ROWS)
        out, logsumexp = _attend_tile(queries.reshape(kv_heads, -1, size), wide_k, wide_v, *where)
        outs.append(out.view(heads, ROWS, size).transpose(0, 1))
        sums.append(logsumexp.view(heads, ROWS).t())
    keep = slice(length - count - begin, length - begin)
    return torch.cat(outs)[keep].to(q.dtype), torch.cat(sums)[keep]


def _attend_tile(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, form: AttentionForm, sinks: torch.Tensor | None, first: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention of q[G, rows, d], a group's heads times positions first to first + 15; sinks[G, rows] -> out
    like q, logsumexp [G, rows]."""
    rows = torch.arange(first, first + ROWS).repeat(q.shape[1] // ROWS)
    blocks = range(form.begin(first) // KEYS * KEYS, first + ROWS, KEYS)
    scores = []
    for block in blocks:
        part = torch.stack(
            [torch.mm(a, b.t()) for a, b in zip(q, k[block : block + KEYS].transpose(0, 1), strict=True)]
        )
        hidden = _masked(rows, torch.arange(block, block + KEYS), form)
        scores.append(_capped(part * form.scale, form.cap).masked_fill(hidden, float("-inf")))
    maximum = torch.stack([part.amax(-1) for part in scores]).amax(0).unsqueeze(-1)
    out, total = torch.zeros_like(q), torch.zeros(q.shape[:2])
    if sinks is not None:
        maximum = torch.maximum(maximum, sinks.unsqueeze(-1))
        total += elementwise_exp(sinks - maximum[..., 0])
    for block, part in zip(blocks, scores, strict=True):
        weights = elementwise_exp(part - maximum)
        total += row_sum(weights)
        out += torch.stack(
            [torch.mm(a, b) for a, b in zip(weights, v[block : block + KEYS].transpose(0, 1), strict=True)]
        )
    return out / total.unsqueeze(-1), maximum[..., 0] + torch.log(total.double()).float()


def _attend_backward(
    piece: list[torch.Tensor], logsumexp: torch.Tensor, form: AttentionForm
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of q[H, n, d], k, v[G, L, d] from q, k, v, o, grad of the last n positions (Dao et al. 2022,
    algorithm 4)."""
    q, k, v, out, grad = piece
    group = q.shape[0] // k.shape[0]
    wide_k, wide_v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    positions = torch.arange(k.shape[1])
    hidden = _masked(positions[k.shape[1] - q.shape[1] :], positions, form)
    scores = _capped(q @ wide_k.transpose(1, 2) * form.scale, form.cap)
    p = torch.exp(scores.masked_fill(hidden, float("-inf")) - logsumexp.unsqueeze(-1))
    slope = p * (grad @ wide_v.transpose(1, 2) - (grad * out).sum(-1, keepdim=True)) * form.scale
    if form.cap is not None:
        slope = slope * (1.0 - (scores / form.cap) ** 2)
    dk, dv = slope.transpose(1, 2) @ q, p.transpose(1, 2) @ grad
    return slope @ wide_k, dk.unflatten(0, (-1, group)).sum(1), dv.unflatten(0, (-1, group)).sum(1)


def _masked(rows: torch.Tensor, keys: torch.Tensor, form: AttentionForm) -> torch.Tensor:
    """Return the mask [rows, keys] of key positions that query positions may not read."""
    distance = rows.unsqueeze(1) - keys
    hidden = distance < 0
    return hidden if form.window is None else hidden | (distance >= form.window)


def _capped(scores: torch.Tensor, cap: float | None) -> torch.Tensor:
    return scores if cap is None else (torch.tanh(scores.double() / cap) * cap).float()


def _statistics(logits: torch.Tensor, temperature: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return z = logits / temperature, its row maximum, exp(z - max) and the log of its sum."""
    z = logits * (1.0 / torch.where(temperature == 0, 1.0, temperature)).unsqueeze(1)
    maximum = z.amax(1)
    weights = elementwise_exp(z - maximum.unsqueeze(1))
    return z, maximum, weights, torch.log(row_sum(weights).double()).float()


def _limits(kept: KeptRows) -> Iterator[tuple[int, torch.Tensor | None]]:
    """Yield the index of each row, and the ids that it is limited to; None for a row without limits."""
    offsets, ids = kept[0].tolist(), kept[1].to(torch.int64)
    for n, (begin, end) in enumerate(pairwise(offsets)):
        yield n, ids[begin:end] if end > begin else None


def _keep(logits: torch.Tensor, weights: torch.Tensor, limits: tuple[int, float, float]) -> torch.Tensor:
    """Return the ids of the kept tokens, ascending. `limits` are top_k, top_p, min_p; see `ops.sample`."""
    top_k, top_p, min_p = limits
    ids = torch.sort(logits, descending=True, stable=True).indices
    ids = ids[:top_k] if top_k > 0 else ids
    weights_left = weights[ids]
    if top_p < 1.0:
        reached = weights_left.cumsum(0) >= float(torch.tensor(top_p)) * weights_left.sum()
        count = int(reached.int().argmax()) + 1 if bool(reached.any()) else len(ids)
        ids, weights_left = ids[:count], weights_left[:count]
    ids = ids[(weights_left > 0) & (weights_left >= min_p)].sort().values
    return ids if len(ids) else ids.new_zeros(1)  # a row of NaN


def _invert(weights: torch.Tensor, u: float) -> int:
    cumulative = weights.cumsum(0)
    return min(int(torch.searchsorted(cumulative, u * cumulative[-1], right=True)), len(weights) - 1)


def uniform(seed: int, position: int) -> float:
    """Return the first word of Philox4x32-10 (Salmon et al. 2011) for this key and counter, as (top 24 bits + 0.5) /
    2^24."""
    mask = 0xFFFFFFFF
    counter = [position & mask, position >> 32 & mask, 0, 0]
    key = [seed & mask, seed >> 32 & mask]
    for _ in range(10):
        a, b = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [(b >> 32) ^ counter[1] ^ key[0], b & mask, (a >> 32) ^ counter[3] ^ key[1], a & mask]
        key = [(key[0] + 0x9E3779B9) & mask, (key[1] + 0xBB67AE85) & mask]
    return ((counter[0] >> 8) + 0.5) / 2**24
