"""Divergences between a model's distributions and a teacher's, in chunks of rows: the [M, V] logits of a micro-batch
never exist at once.

Shapes: M rows, D width of the model, E width of the teacher, V vocabulary, K most likely tokens of a row, O outcomes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch.utils.checkpoint import checkpoint

from sparring.model.causal import CausalModel
from sparring.model.head import TargetRows, add_bias, sampling_logits
from sparring.protocols import Divergence

CHUNK_ROWS = 256
"""Rows of a chunk. A few tensors [rows, V] exist at once: logits of model and teacher, and intermediate results."""

LEAST_REST = 2.0**-24
"""Minimum probability of all tokens outside a teacher's top K: float32 log-probabilities cannot resolve a smaller
one."""


def from_teacher(
    model: CausalModel,
    hidden: torch.Tensor,
    teacher: CausalModel,
    teacher_hidden: torch.Tensor,
    targets: TargetRows,
    form: Divergence,
) -> torch.Tensor:
    """Compute the divergence over the vocabulary between softmax((logits + bias) / temperature) of the model and of
    `teacher`. For truncated sampling, both distributions are renormalised over the kept ids. A KL divergence is thus
    the expectation, over tokens drawn from its first distribution, of the difference of the log-probabilities that
    `token_quantities` computes for the two models.

    If the two heads have different numbers of rows (padding of one tokenizer's vocabulary), both distributions are over
    the ids that both have.

    Args:
        hidden: [M, D].
        teacher_hidden: [M, E], no gradient.
        targets: sampling distribution of each of the M tokens.

    Returns:
        [M], with gradient for the model.
    """

    def chunk(rows: torch.Tensor, teacher_rows: torch.Tensor, of: TargetRows) -> torch.Tensor:
        with torch.no_grad():
            teacher_logits = teacher.logits(teacher_rows)
        policy_logits = model.logits(rows)
        shared = min(policy_logits.shape[1], teacher_logits.shape[1])
        log_q, log_p = (
            sampling_logits(add_bias(logits, of.bias), of)[:, :shared].log_softmax(1)
            for logits in (policy_logits, teacher_logits)
        )
        return between(log_p, log_q, form)

    return _in_chunks(chunk, *(rows.split(CHUNK_ROWS) for rows in (hidden, teacher_hidden)), targets.split(CHUNK_ROWS))


def from_tops(
    model: CausalModel,
    hidden: torch.Tensor,
    temperature: torch.Tensor,
    tops: tuple[torch.Tensor, torch.Tensor],
    form: Divergence,
) -> torch.Tensor:
    """Compute the divergence over a teacher's most likely tokens and one outcome for all other tokens. See `outcomes`.

    Args:
        hidden: [M, D].
        temperature: [M] float32, above 0; the teacher's log-probabilities are at the same temperature.
        tops: ids [M, K] int64 and log-probabilities [M, K], padded with -1 and minus infinity.

    Returns:
        [M], with gradient; 0 in a row without teacher's tokens.
    """

    def chunk(rows: torch.Tensor, ids: torch.Tensor, logprobs: torch.Tensor, heat: torch.Tensor) -> torch.Tensor:
        log_p, log_q = outcomes(model.logits(rows) / heat[:, None], ids, logprobs)
        return between(log_p, log_q, form)

    return _in_chunks(chunk, *(rows.split(CHUNK_ROWS) for rows in (hidden, *tops, temperature)))


def outcomes(logits: torch.Tensor, ids: torch.Tensor, logprobs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a teacher's and the model's log-probabilities of K tokens and of all other tokens, merged into one
    outcome.

    Merging outcomes never raises an f-divergence (log-sum inequality: Cover and Thomas, Elements of Information Theory,
    theorem 2.7.1), so the result is a lower bound of the divergence over the vocabulary, and equal to it if K = V.
    Unlike the renormalised top K, it is 0 only if the model also agrees on the rest (on that bias: arXiv 2503.16870,
    section 3).

    Args:
        logits: [M, V], divided by the temperature.
        ids: [M, K] int64; -1, or an id that the model does not have, belongs to the rest.
        logprobs: [M, K], the teacher's log-probabilities of these ids.

    Returns:
        log p [M, K + 1] and log q [M, K + 1], minus infinity for a missing outcome.
    """
    valid = (ids >= 0) & (ids < logits.shape[1])
    has_ids = valid.any(1)
    log_z = logits.logsumexp(1, keepdim=True)
    nothing = torch.full_like(log_z, -math.inf)
    log_q = torch.where(valid, logits.gather(1, ids.where(valid, 0)) - log_z, nothing)
    log_p = torch.where(valid, logprobs.to(logits.dtype), nothing)
    taken = logits.new_zeros(len(logits), logits.shape[1] + 1, dtype=torch.bool)
    taken = taken.scatter(1, ids.where(valid, logits.shape[1]), True)[:, :-1]
    some = (has_ids & ~taken.all(1))[:, None]
    # a row without a rest passes finite values to logsumexp, whose gradient would otherwise be NaN
    rest = torch.where(some, logits.masked_fill(taken & some, -math.inf).logsumexp(1, keepdim=True) - log_z, nothing)
    log_rest = (1.0 - log_p.exp().sum(1, keepdim=True)).clamp(min=LEAST_REST).log()
    return torch.cat((log_p, torch.where(some, log_rest, nothing)), 1), torch.cat((log_q, rest), 1)


def between(log_p: torch.Tensor, log_q: torch.Tensor, form: Divergence) -> torch.Tensor:
    """Compute the divergence of two distributions over the same outcomes; 0 log 0 is 0.

        forward         KL(p || q) = sum p (log p - log q)
        reverse         KL(q || p)
        jensen_shannon  beta KL(p || m) + (1 - beta) KL(q || m), m = beta p + (1 - beta) q   (GKD, arXiv 2306.13649)

    Args:
        log_p: [M, O], the teacher's log-probabilities.
        log_q: [M, O], the model's log-probabilities.

    Returns:
        [M], with gradient for log_q.
    """
    if form.kind == "forward":
        return _kl(log_p, log_q)
    if form.kind == "reverse":
        return _kl(log_q, log_p)
    valid = log_q > -math.inf  # merged from the same ids, so that both have the same outcomes
    p, q = (torch.where(valid, values, 0.0) for values in (log_p, log_q))
    log_m = torch.where(valid, torch.logaddexp(p + math.log(form.beta), q + math.log1p(-form.beta)), -math.inf)
    return form.beta * _kl(log_p, log_m) + (1.0 - form.beta) * _kl(log_q, log_m)


def _kl(log_a: torch.Tensor, log_b: torch.Tensor) -> torch.Tensor:
    """Compute KL(a || b) [M]. An outcome with probability 0 under `a` adds nothing."""
    valid = log_a > -math.inf
    a, b = (torch.where(valid, values, 0.0) for values in (log_a, log_b))
    return torch.where(valid, a.exp() * (a - b), 0.0).sum(1)


def _in_chunks(chunk: Callable[..., torch.Tensor], *columns: Iterable[object]) -> torch.Tensor:
    """Call `chunk` for one chunk of rows after another; with gradients, the backward pass recomputes each chunk."""
    again = torch.is_grad_enabled()
    parts = [
        checkpoint(chunk, *rows, use_reentrant=False) if again else chunk(*rows) for rows in zip(*columns, strict=True)
    ]
    return torch.cat(parts)
