"""Quantities of given tokens under the model, computed in chunks of rows. A loss never sees logits.

Shapes: M rows, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from typing import NamedTuple

import torch
from torch.utils.checkpoint import checkpoint

from sparring.errors import refusal
from sparring.kernels import ops
from sparring.kernels.truncation import KeptRows, select_rows, split_rows
from sparring.model.causal import CausalModel

BiasRows = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""offsets [M + 1] int64, ids [A] int64, values [A] float32: values[offsets[m]:offsets[m + 1]] are added to the logits
of row m at the ids of the same positions; ids beyond the vocabulary are ignored."""

QUANTITIES = frozenset({"logprob", "entropy", "probability_squares"})
SCALAR_QUANTITIES = frozenset({"value"})
"""Quantities of a scalar head: for each target, the value of the text before it."""
CHUNK_ROWS = 1024
CHUNK_ELEMENTS, CHUNK_ELEMENTS_ON_DEVICE = 1 << 24, 1 << 27
"""A chunk has at most CHUNK_ROWS rows and 64 MiB of float32 logits (512 MiB on a GPU, which few rows leave idle), but
at least 16 rows."""
KEEP_ELEMENTS = 1 << 25
"""Maximum number of logits that are kept for the backward pass: 128 MiB of float32."""


class TargetRows(NamedTuple):
    """Targets of M rows of logits, with the temperature, kept ids and biases with which each target was drawn."""

    targets: torch.Tensor
    """[M] int64."""
    temperature: torch.Tensor
    """[M] float32."""
    kept: KeptRows | None
    bias: BiasRows | None

    def split(self, size: int) -> Iterator[TargetRows]:
        """Split into chunks of `size` rows."""
        columns = self.targets.split(size), self.temperature.split(size)
        rows = len(self.targets)
        return map(TargetRows, *columns, split_rows(self.kept, rows, size), split_rows(self.bias, rows, size))

    def select(self, rows: torch.Tensor) -> TargetRows:
        """Select the rows where `rows` [M] is true."""
        return TargetRows(
            self.targets[rows], self.temperature[rows], select_rows(self.kept, rows), select_rows(self.bias, rows)
        )


def token_quantities(
    model: CausalModel,
    hidden: torch.Tensor,
    targets: torch.Tensor,
    temperature: torch.Tensor,
    needs: Set[str],
    kept: KeptRows | None = None,
    bias: BiasRows | None = None,
    *,
    keep_elements: int = KEEP_ELEMENTS,
) -> dict[str, torch.Tensor]:
    """Compute quantities of each target under its distribution, softmax((logits + bias) / temperature) over the kept
    ids: log-probability, entropy, and sum of squared probabilities.

    Args:
        hidden: [M, D].
        targets: [M] int64.
        temperature: [M] float32; 0 means greedy sampling, as in `Sampling`.
        needs: names out of `QUANTITIES`, or out of `SCALAR_QUANTITIES` for a scalar head.
        kept: ids that truncated sampling kept for each row; None without truncation.
        keep_elements: maximum number of logits that are kept for the backward pass. For more, the backward pass
            recomputes each chunk, so that [M, V] logits never exist at once: only the head's weight and its gradient
            grow with V.

    Returns:
        A tensor [M] float32 for each needed name, with gradients except for `probability_squares`.

    Raises:
        BadInput: an unknown name is needed, or a target is not among its kept ids.
    """
    supported = SCALAR_QUANTITIES if model.is_scalar else QUANTITIES
    unknown = set(needs) - supported
    if unknown:
        raise refusal("token_quantities", f"names out of {sorted(supported)}", f"{sorted(unknown)}", "use another loss")
    if model.is_scalar:
        return {"value": model.values(hidden)}
    recompute = torch.is_grad_enabled() and hidden.shape[0] * model.vocab_size > keep_elements
    hidden, total = model.weight_sum(hidden) if recompute else (hidden, None)

    def of_chunk(rows: torch.Tensor, target_rows: TargetRows) -> dict[str, torch.Tensor]:
        return _quantities(add_bias(model.logits(rows, total), target_rows.bias), target_rows, needs)

    size, target_rows = _chunk_rows(model), TargetRows(targets, temperature, kept, bias)
    # split, not slices: the gradient of each slice would be a whole [M, D] of its own
    chunks = [
        checkpoint(of_chunk, *arguments, use_reentrant=False) if recompute else of_chunk(*arguments)
        for arguments in zip(hidden.split(size), target_rows.split(size), strict=True)
    ]
    return {
        name: torch.cat([chunk[name] for chunk in chunks]) if len(chunks) > 1 else chunks[0][name] for name in chunks[0]
    }


def _quantities(logits: torch.Tensor, target_rows: TargetRows, needs: Set[str]) -> dict[str, torch.Tensor]:
    """Compute quantities [M, ...] of a chunk's logits [M, V], biases included. The gradient overwrites the logits."""
    logprob, entropy = ops.token_logprobs(
        logits, target_rows.targets, target_rows.temperature, target_rows.kept, spent=True
    )
    quantities = {name: value for name, value in (("logprob", logprob), ("entropy", entropy)) if name in needs}
    return (
        quantities | {"probability_squares": _squares(logits, target_rows)}
        if "probability_squares" in needs
        else quantities
    )


@torch.no_grad()
def _squares(logits: torch.Tensor, target_rows: TargetRows) -> torch.Tensor:
    """Compute sum_v p(v)^2 = exp(logsumexp(2 z) - 2 logsumexp(z)) of each row of logits z [M, V], over the kept ids."""
    scaled = sampling_logits(logits, target_rows)
    return ((2 * scaled).logsumexp(1) - 2 * scaled.logsumexp(1)).exp()


def sampling_logits(logits: torch.Tensor, target_rows: TargetRows) -> torch.Tensor:
    """Return logits [M, V] whose softmax is the sampling distribution of each row: divided by the temperature, and
    minus infinity at ids that were not kept. `logits` include the biases."""
    scaled = logits / torch.where(target_rows.temperature == 0, 1.0, target_rows.temperature)[:, None]
    if target_rows.kept is None:
        return scaled
    offsets, ids = target_rows.kept
    counts = offsets.diff()
    inside = (counts == 0)[:, None].repeat(1, logits.shape[1])
    rows, valid = torch.repeat_interleave(torch.arange(len(counts), device=ids.device), counts), ids < logits.shape[1]
    inside[rows[valid], ids[valid].long()] = True
    return scaled.masked_fill(~inside, -torch.inf)


def _chunk_rows(model: CausalModel) -> int:
    """Return the number of rows of a chunk: a multiple of 16, for the matrix product."""
    elements = CHUNK_ELEMENTS if model.device.type == "cpu" else CHUNK_ELEMENTS_ON_DEVICE
    return max(16, min(CHUNK_ROWS, elements // model.vocab_size // 16 * 16))


class Judged(NamedTuple):
    """Scores of given tokens: logprob [M], entropy [M] and, for the most likely tokens, top_ids [M, k] int64 and
    top_logprobs [M, k]."""

    logprob: torch.Tensor
    entropy: torch.Tensor
    top_ids: torch.Tensor
    top_logprobs: torch.Tensor


@torch.no_grad()
def score_tokens(
    model: CausalModel, hidden: torch.Tensor, targets: torch.Tensor, temperature: torch.Tensor, top_k: int = 0
) -> Judged:
    """Compute log-probability and entropy of targets[M] int64 for hidden[M, D] and temperature[M] float32, bitwise
    equal to those of `token_quantities` but without gradients, and the `top_k` (0 to V) most likely tokens of each row,
    best first, ties by id. A token has the same log-probability as target and as top token."""
    chunks, size = [], _chunk_rows(model)
    for rows, wanted, heat in zip(*(t.split(size) for t in (hidden, targets, temperature)), strict=True):
        logits = model.logits(rows)
        ids = _likeliest(logits, top_k)
        tops = [ops.token_logprobs(logits, column.contiguous(), heat)[0] for column in ids.unbind(1)]
        top_logprobs = torch.stack(tops, 1) if tops else logits.new_empty(len(rows), 0)
        chunks.append(Judged(*ops.token_logprobs(logits, wanted, heat), ids, top_logprobs))
    return Judged(*(torch.cat(parts) if len(parts) > 1 else parts[0] for parts in zip(*chunks, strict=True)))


def add_bias(logits: torch.Tensor, bias: BiasRows | None) -> torch.Tensor:
    """Return logits [M, V] plus their biases: the sum that the engine computes before it samples."""
    if bias is None:
        return logits
    offsets, ids, values = bias
    rows = torch.repeat_interleave(torch.arange(len(logits), device=ids.device), offsets.diff())
    valid = (ids >= 0) & (ids < logits.shape[1])
    return logits.index_put((rows[valid], ids[valid]), values[valid], accumulate=True)


def _likeliest(logits: torch.Tensor, count: int) -> torch.Tensor:
    """Return the ids [M, count] of the largest logits [M, V], ties by id. `topk` alone does not define which of equal
    logits it takes."""
    if count == 0:
        return logits.new_empty(len(logits), 0, dtype=torch.int64)
    least = logits.topk(count, dim=1).values[:, -1:]
    above, equal = logits > least, logits == least
    taken = above | (equal & (equal.cumsum(1) <= count - above.sum(1, keepdim=True)))
    ids = taken.nonzero()[:, 1].view(len(logits), count)
    order = logits.gather(1, ids).sort(dim=1, descending=True, stable=True).indices
    return ids.gather(1, order)
