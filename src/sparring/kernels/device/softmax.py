"""Softmax over the vocabulary on a GPU, in Triton: statistics of given tokens, their gradients, and draws.

A row is read in parts of one size, each by a program of its own, so that a single row occupies a large GPU. Sums of the
parts are added in their order. A program is compiled once for all rows, whatever their address and number, so a row's
bits depend on that row alone. Exponentials are computed in float64 and rounded to float32, sums in float64.

Shapes: N rows, V vocabulary, P parts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sparring.kernels.device.sampling import keep
from sparring.kernels.path import SamplingRows, SavedLogprobs

PART = 4096
"""Tokens of a part."""

_ROWS = ["logits", "temperature", "V"]
_SUMS = ["maxima", "sums", "shifts"]


def _compiled_once(*names: str) -> dict[str, list[str]]:
    """Return settings with which Triton compiles no second program for an aligned address or a round number."""
    return {"do_not_specialize": [*_ROWS, *names], "do_not_specialize_on_alignment": [*_ROWS, *names]}


@triton.jit
def _scaled(logits, temperature, row, at, V):
    """Load logits at `at` divided by the row's temperature (0 means 1), minus infinity beyond the vocabulary."""
    heat = tl.load(temperature + row)
    inverse = tl.div_rn(1.0, tl.where(heat == 0.0, 1.0, heat))
    return tl.load(logits + row * V + at, mask=at < V, other=float("-inf")) * inverse


@triton.jit
def _weights(z, maximum):
    """Compute exp(z - maximum) in float64, rounded to float32."""
    return tl.exp((z - maximum).to(tl.float64)).to(tl.float32)


@triton.jit
def _maximum_of(maxima, row, PARTS: tl.constexpr, COUNT: tl.constexpr):
    nth = tl.arange(0, PARTS)
    return tl.max(tl.load(maxima + row * COUNT + nth, mask=nth < COUNT, other=float("-inf")), 0)


@triton.jit(**_compiled_once("maxima"))
def _part_maxima(logits, temperature, maxima, V, COUNT: tl.constexpr, PART: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    z = _scaled(logits, temperature, row, part * PART + tl.arange(0, PART), V)
    tl.store(maxima + row * COUNT + part, tl.max(tl.where(z == z, z, float("-inf")), 0))  # a NaN shows in the sums


@triton.jit(**_compiled_once(*_SUMS))
def _part_sums(
    logits, temperature, maxima, sums, shifts, V, PARTS: tl.constexpr, COUNT: tl.constexpr, PART: tl.constexpr
):
    """Sum the weights w = exp(z - maximum) of a part, and w * (z - maximum)."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    maximum = _maximum_of(maxima, row, PARTS, COUNT)
    z = _scaled(logits, temperature, row, part * PART + tl.arange(0, PART), V)
    weights = _weights(z, maximum)
    shifted = weights.to(tl.float64) * tl.where(weights > 0, z - maximum, 0.0).to(tl.float64)
    tl.store(sums + row * COUNT + part, tl.sum(weights.to(tl.float64), 0))
    tl.store(shifts + row * COUNT + part, tl.sum(shifted, 0))


@triton.jit
def _total(sums, row, COUNT: tl.constexpr):
    total = tl.load(sums + row * COUNT)
    for part in range(1, COUNT):
        total += tl.load(sums + row * COUNT + part)
    return total


@triton.jit
def _log(total):
    """Compute the logarithm of a float64 number, rounded to float32."""
    return tl.log(total).to(tl.float32)


@triton.jit(**_compiled_once("targets", "logprobs", "entropies", "tops", "log_sums", *_SUMS))
def _statistics(
    logits, temperature, targets, maxima, sums, shifts, logprobs, entropies, tops, log_sums, V,
    PARTS: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    maximum, total = _maximum_of(maxima, row, PARTS, COUNT), _total(sums, row, COUNT)
    log_sum = _log(total)
    target = tl.load(targets + row)
    tl.store(logprobs + row, _scaled(logits, temperature, row, target, V) - maximum - log_sum)
    tl.store(entropies + row, log_sum - (_total(shifts, row, COUNT) / total).to(tl.float32))
    tl.store(tops + row, maximum)
    tl.store(log_sums + row, log_sum)


@triton.jit
def _philox(seed, position):
    """Compute the first word of Philox4x32-10 (Salmon et al. 2011) for a key and a counter of 64 bits, as uint64."""
    low: tl.constexpr = 0xFFFFFFFF
    seed, position = seed.to(tl.uint64, bitcast=True), position.to(tl.uint64, bitcast=True)
    c0, c1 = position & low, position >> 32
    c2, c3 = tl.zeros_like(c0), tl.zeros_like(c0)
    k0, k1 = seed & low, seed >> 32
    for _ in range(10):
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & low, (a >> 32) ^ c3 ^ k1, a & low
        k0, k1 = (k0 + 0x9E3779B9) & low, (k1 + 0xBB67AE85) & low
    return c0


@triton.jit(**_compiled_once("seeds", "positions", "tokens", "logprobs", *_SUMS))
def _draw(
    logits, temperature, seeds, positions, maxima, sums, tokens, logprobs, V,
    PARTS: tl.constexpr, COUNT: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Draw the first token whose cumulative weight exceeds u of the total; at temperature 0, the first of the
    likeliest."""
    row = tl.program_id(0).to(tl.int64)
    maximum, total = _maximum_of(maxima, row, PARTS, COUNT), _total(sums, row, COUNT)
    greedy = tl.load(temperature + row) == 0.0
    word = _philox(tl.load(seeds + row), tl.load(positions + row))
    threshold = ((word >> 8).to(tl.float64) + 0.5) / 16777216.0 * total
    # the part that reaches the threshold, and the sum before it; the last part with a weight if rounding leaves none
    chosen, before, running = tl.full((), COUNT - 1, tl.int32), total * 0.0, total * 0.0
    found = tl.full((), 0, tl.int32)
    for part in range(COUNT):
        of_part = tl.load(sums + row * COUNT + part)
        matches = tl.where(greedy, tl.load(maxima + row * COUNT + part) == maximum, running + of_part > threshold)
        takes = (found == 0) & (matches | (~greedy & (of_part > 0)))
        chosen, before = tl.where(takes, part, chosen), tl.where(takes, running, before)
        found = tl.where(matches, 1, found)
        running += of_part
    at = chosen * PART + tl.arange(0, PART)
    z = _scaled(logits, temperature, row, at, V)
    weights = _weights(z, maximum)
    passes = (before + tl.cumsum(weights.to(tl.float64), 0) > threshold) & (weights > 0)
    first = tl.min(tl.where(tl.where(greedy, z == maximum, passes), at, V), 0)
    last = tl.max(tl.where(weights > 0, at, 0), 0)
    token = tl.where(first < V, first, tl.where(greedy, V - 1, last)).to(tl.int64)
    tl.store(tokens + row, token)
    tl.store(logprobs + row, _scaled(logits, temperature, row, token, V) - maximum - _log(total))


@triton.jit(**_compiled_once("targets", "maxima", "log_sums", "entropies", "grad_logprob", "grad_entropy", "out"))
def _gradient(
    logits, temperature, targets, maxima, log_sums, entropies, grad_logprob, grad_entropy, out, V,
    ENTROPY: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of the logits into `out`, which may be the logits' own memory."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * PART + tl.arange(0, PART)
    heat = tl.load(temperature + row)
    inverse = tl.div_rn(1.0, tl.where(heat == 0.0, 1.0, heat))
    z = tl.load(logits + row * V + at, mask=at < V, other=0.0) * inverse
    log_p = z - (tl.load(maxima + row) + tl.load(log_sums + row))
    p = tl.exp(log_p.to(tl.float64)).to(tl.float32)
    pull = tl.load(grad_logprob + row)
    gradient = -p * pull + tl.where(at == tl.load(targets + row), pull, 0.0)
    if ENTROPY:
        spread = tl.maximum(log_p, -1e30) + tl.load(entropies + row)
        gradient -= p * spread * tl.load(grad_entropy + row)
    tl.store(out + row * V + at, gradient * inverse, mask=at < V)


def _parts(width: int) -> dict[str, int]:
    count = -(-width // PART)
    return {"PARTS": triton.next_power_of_2(count), "COUNT": count}


def _sums(logits: torch.Tensor, temperature: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return maxima [N, P] float32, sums of weights and of weighted shifts [N, P] float64, by parts of each row."""
    rows, width = logits.shape
    parts, count = _parts(width), -(-width // PART)
    maxima = torch.empty(rows, count, dtype=torch.float32, device=logits.device)
    sums, shifts = (torch.empty(rows, count, dtype=torch.float64, device=logits.device) for _ in range(2))
    once = {"PART": PART, "num_warps": 8, "enable_fp_fusion": False}
    _part_maxima[(rows, count)](logits, temperature, maxima, width, COUNT=count, **once)
    _part_sums[(rows, count)](logits, temperature, maxima, sums, shifts, width, **parts, **once)
    return maxima, sums, shifts


def log_statistics(
    logits: torch.Tensor, targets: torch.Tensor, temperature: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute log-probability of targets[N], entropy, maximum and log of the sum of each row, [N] float32, for
    logits[N, V] / temperature[N] (0 means 1)."""
    logits, (rows, width) = logits.contiguous(), logits.shape
    out = torch.empty(4, rows, dtype=torch.float32, device=logits.device)
    if rows:
        sums = _sums(logits, temperature)
        inputs = (logits, temperature, targets.contiguous())
        _statistics[(rows,)](*inputs, *sums, *out, width, **_parts(width), num_warps=1, enable_fp_fusion=False)
    return out[0], out[1], out[2], out[3]


def draw(
    logits: torch.Tensor, requests: SamplingRows, *, truncating: bool
) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor] | None]:
    """Draw a token for each row of logits[N, V] float32, as `ops.sample`; `truncating` says whether a row may be
    truncated or limited.

    The uniform number is (top 24 bits + 0.5) / 2^24 of Philox's first word for the row's seed and position.

    Returns:
        tokens [N] int64, log-probabilities [N] float32, and, if `truncating`, a pair: mask of truncated rows [N], and
            mask of the tokens that each row may draw [N, V].
    """
    temperature, top_k, top_p, min_p, seeds, positions, limited = requests
    (rows, width), kept = logits.shape, None
    if truncating:
        cut = ((top_k > 0) & (top_k < width)) | (top_p < 1) | (min_p > 0) | (limited > 0)
        kept = cut & (temperature != 0), keep(logits, temperature, (top_k, top_p, min_p))
        logits = logits.masked_fill(~kept[1] & kept[0].unsqueeze(1), float("-inf"))
    logits = logits.contiguous()
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows:
        maxima, sums, _ = _sums(logits, temperature)
        inputs = (logits, temperature, seeds.contiguous(), positions.contiguous(), maxima, sums)
        once = {"PART": PART, "num_warps": 8, "enable_fp_fusion": False}
        _draw[(rows,)](*inputs, tokens, logprobs, width, **_parts(width), **once)
    return tokens, logprobs, kept


def logits_gradient(
    saved: SavedLogprobs, grad_logprob: torch.Tensor, grad_entropy: torch.Tensor | None, *, spent: bool
) -> torch.Tensor:
    """Return the gradient of logits [N, V] from the gradients of logprob and entropy [N], in place if the logits are
    `spent`."""
    logits, targets, temperature, entropy, maximum, log_sum = saved
    logits, (rows, width) = logits.contiguous(), logits.shape
    out = logits if spent else torch.empty_like(logits)
    pull = grad_logprob.contiguous()
    if rows:
        _gradient[(rows, -(-width // PART))](
            logits, temperature, targets.contiguous(), maximum, log_sum, entropy, pull,
            pull if grad_entropy is None else grad_entropy.contiguous(), out, width,
            ENTROPY=grad_entropy is not None, PART=PART, num_warps=8, enable_fp_fusion=False,
        )  # fmt: skip
    return out
