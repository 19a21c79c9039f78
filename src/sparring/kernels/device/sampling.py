"""Truncated sampling for many rows at once, on any device: the tokens that each row keeps, as masks and as kept sets.

Sums are elementwise additions of whole tensors in an order that depends on the width alone; so a row's kept tokens
depend neither on its neighbours nor on how a device splits a reduction. Shapes: N rows, V vocabulary, W words of a
mask.
"""

from __future__ import annotations

import numpy as np
import torch

from sparring.kernels.truncation import KeptRows

LANE = 1024
"""Elements of a block: cumulative sums are computed within blocks, then combined."""


def running_sum(x: torch.Tensor) -> torch.Tensor:
    """Compute inclusive cumulative sums of each row of [N, D], by doubling strides (Hillis and Steele 1986)."""
    if x.shape[-1] > LANE:
        width = x.shape[-1]
        lanes = running_sum(torch.nn.functional.pad(x, (0, -width % LANE)).unflatten(-1, (-1, LANE)))
        before = torch.nn.functional.pad(running_sum(lanes[..., -1])[..., :-1], (1, 0))
        return (lanes + before.unsqueeze(-1)).flatten(-2)[..., :width]
    stride = 1
    while stride < x.shape[-1]:
        x = x + torch.nn.functional.pad(x[..., :-stride], (stride, 0))
        stride *= 2
    return x


def keep(
    logits: torch.Tensor, temperature: torch.Tensor, limits: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """Return the kept tokens [N, V] of logits[N, V] / temperature[N] (0 means 1); `limits` are top_k, top_p, min_p,
    each [N]."""
    top_k, top_p, min_p = (limit.unsqueeze(1) for limit in limits)
    z = logits * (1.0 / torch.where(temperature == 0, 1.0, temperature)).unsqueeze(1)
    weights = torch.exp((z - z.amax(1, keepdim=True)).double()).float().double()
    order = torch.sort(logits, dim=1, descending=True, stable=True).indices
    ordered = weights.gather(1, order)
    rank = torch.arange(logits.shape[1], device=logits.device)
    mask = (top_k <= 0) | (rank < top_k)
    sums = running_sum(torch.where(mask, ordered, 0.0))
    # the shortest prefix that reaches top_p: tokens whose preceding sum is below it
    before = torch.nn.functional.pad(sums[:, :-1], (1, 0))
    mask = mask & ((top_p >= 1) | (before < top_p.double() * sums[:, -1:]))
    mask = mask & (ordered > 0) & (ordered >= min_p)
    mask[:, 0] |= ~mask.any(1)  # a row of NaN
    return torch.zeros_like(mask).scatter_(1, order, mask)


def kept_of(kept: KeptRows | None, shape: torch.Size) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return a mask [N, V] of the tokens that each row is limited to (all for a row without limits), and a mask [N] of
    rows whose ids do not ascend within the vocabulary; None if `kept` is None."""
    if kept is None:
        return None
    offsets, ids = kept[0], kept[1].to(torch.int64)
    counts = offsets.diff()
    rows = torch.repeat_interleave(torch.arange(shape[0], device=ids.device), counts)
    invalid = (ids < 0) | (ids >= shape[1])
    invalid[1:] |= (ids[1:] <= ids[:-1]) & (rows[1:] == rows[:-1])
    wrong = torch.zeros(shape[0], dtype=torch.bool, device=ids.device).index_fill_(0, rows[invalid], True)
    limited_to = (counts == 0).unsqueeze(1).expand(shape).clone()
    limited_to[rows[~invalid], ids[~invalid]] = True
    return limited_to, wrong


def words_of(kept: torch.Tensor) -> np.ndarray:
    """Pack kept[N, V] into masks [N, W] uint64, for `kept.ids_of`."""
    padded = torch.nn.functional.pad(kept, (0, -kept.shape[1] % 64)).unflatten(1, (-1, 8)).to(torch.uint8)
    powers = 2 ** torch.arange(8, device=kept.device, dtype=torch.uint8)
    words: np.ndarray = (padded * powers).sum(2, dtype=torch.uint8).cpu().numpy().view(np.uint64)
    return words
