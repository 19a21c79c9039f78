"""Softmax statistics and sampling for many rows at once, on any device, in the same order for every row.

Every sum is a sequence of elementwise additions of whole tensors that depends on the width alone; so the bits depend
neither on the number of rows nor on their neighbours nor on how a device splits a reduction. Shapes: N rows, V
vocabulary, W words of a mask.
"""

from __future__ import annotations

import numpy as np
import torch

from sparring.kernels.kept import KeptRows
from sparring.kernels.path import SamplingRows
from sparring.kernels.torch.operations import row_sum

LANE = 1024
"""Elements within which cumulative sums are taken before they are combined."""


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


def log_statistics(
    logits: torch.Tensor, targets: torch.Tensor, temperature: torch.Tensor, kept: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute log-probability of the target, entropy, maximum and log of the sum of each row, [N] float32, for
    logits[N, V] / temperature[N] (0 means 1), limited to kept[N, V]."""
    z, maximum, weights = _weights(logits, temperature, kept)
    total = row_sum(weights)
    log_sum = torch.log(total.double()).float()
    shifted = torch.where(weights > 0, z - maximum.unsqueeze(1), 0.0)
    entropy = log_sum - row_sum(weights * shifted) / total
    return z.gather(1, targets.unsqueeze(1))[:, 0] - maximum - log_sum, entropy, maximum, log_sum


def _weights(
    logits: torch.Tensor, temperature: torch.Tensor, kept: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return z = logits / temperature, its row maximum and exp(z - maximum), 0 for tokens that are not kept."""
    if kept is not None:
        logits = logits.masked_fill(~kept, float("-inf"))
    z = logits * (1.0 / torch.where(temperature == 0, 1.0, temperature)).unsqueeze(1)
    maximum = z.amax(1)
    return z, maximum, torch.exp((z - maximum.unsqueeze(1)).double()).float()


def draw(
    logits: torch.Tensor, requests: SamplingRows, *, truncating: bool
) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """Sample one token for each row of logits[N, V], as `ops.sample`.

    Args:
        logits: [N, V] float32.
        requests: temperature, top_k, top_p, min_p, seeds, positions, limited, each [N].
        truncating: whether a row may be truncated or limited.

    Returns:
        tokens [N] int64, log-probabilities [N] float32, and a pair: truncated rows [N], and the tokens that each row
            may give [N, V].
    """
    temperature, top_k, top_p, min_p, seeds, positions, limited = requests
    greedy = temperature == 0
    _, _, weights = _weights(logits, temperature, None)
    truncated, kept = torch.zeros_like(greedy), weights > 0
    if truncating:
        cut = ((top_k > 0) & (top_k < logits.shape[1])) | (top_p < 1) | (min_p > 0) | (limited > 0)
        truncated = cut & ~greedy
        allowed = keep(logits, weights.double(), (top_k, top_p, min_p))
        kept = torch.where(truncated.unsqueeze(1), allowed, kept)
    tokens = _invert(torch.where(kept, weights, 0.0).double(), uniform(seeds, positions))
    tokens = torch.where(greedy, _first(logits == logits.amax(1, keepdim=True)), tokens)
    within = kept | ~truncated.unsqueeze(1) if truncating else None
    return tokens, log_statistics(logits, tokens, temperature, within)[0], (truncated, kept)


def keep(
    logits: torch.Tensor, weights: torch.Tensor, limits: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """Return the kept tokens of each row, [N, V]. `limits` are top_k, top_p, min_p, each [N]; weights[N, V] float64."""
    top_k, top_p, min_p = (limit.unsqueeze(1) for limit in limits)
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


def _invert(weights: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """Return, for each row of weights[N, V] float64, the first index whose cumulative weight exceeds u[N] of the
    total."""
    sums = running_sum(weights)
    passed = (sums <= (u * sums[:, -1]).unsqueeze(1)).sum(1)
    last = weights.shape[1] - 1 - _first((weights > 0).flip(1))
    return torch.minimum(passed, last)


def _first(chosen: torch.Tensor) -> torch.Tensor:
    """Return the index of the first true element of each row of [N, V]; the last index if no element is true."""
    places = torch.arange(chosen.shape[1], device=chosen.device)
    return torch.where(chosen, places, chosen.shape[1] - 1).amin(1)


def uniform(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return the first word of Philox4x32-10 (Salmon et al. 2011) for keys [N] and counters [N] (64 bits, as int64) as
    (top 24 bits + 0.5) / 2^24, float64 [N]."""
    mask = 0xFFFFFFFF
    counter = [positions & mask, positions >> 32 & mask, torch.zeros_like(positions), torch.zeros_like(positions)]
    key = [seeds & mask, seeds >> 32 & mask]
    for _ in range(10):
        (a_high, a_low), (b_high, b_low) = _product(counter[0], 0xD2511F53), _product(counter[2], 0xCD9E8D57)
        counter = [b_high ^ counter[1] ^ key[0], b_low, a_high ^ counter[3] ^ key[1], a_low]
        key = [(key[0] + 0x9E3779B9) & mask, (key[1] + 0xBB67AE85) & mask]
    return ((counter[0] >> 8).double() + 0.5) / 2**24


def _product(x: torch.Tensor, factor: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return high and low 32 bits of x * factor, both below 2^32, computed by halves of x because int64 is signed."""
    low, high = (x & 0xFFFF) * factor, (x >> 16) * factor
    middle = (low >> 16) + high
    return middle >> 16, (middle & 0xFFFF) << 16 | (low & 0xFFFF)


def kept_of(kept: KeptRows | None, shape: torch.Size) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the tokens that each row of logits [N, V] is limited to (all for a row without limits), and the rows [N]
    whose ids do not ascend within the vocabulary."""
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
