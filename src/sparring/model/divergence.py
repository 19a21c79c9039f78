"""Divergences of a model's distributions from a teacher's, in chunks of rows: no [M, V] of a whole micro-batch exists
at once.

M rows, D width of the model, E of the teacher, V vocabulary, K likeliest tokens of a row, O outcomes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Protocol

import torch
from torch.utils.checkpoint import checkpoint

from sparring.model.head import TargetRows, add_bias, sampling_logits
from sparring.protocols import Divergence

CHUNK_ROWS = 256
"""Of each, some [rows, V] exist at once: of the model, of the teacher, and what stands between them."""

LEAST_REST = 2.0**-24
"""Least probability of all that is not among a teacher's likeliest tokens: below, float32 log-probabilities cannot
tell."""


class Head(Protocol):
    """Map from a model's output [M, D] to logits [M, V]; a `CausalModel` is one."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits [M, V] of hidden[M, D]."""


def from_teacher(
    model: Head,
    hidden: torch.Tensor,
    teacher: Head,
    teacher_hidden: torch.Tensor,
    targets: TargetRows,
    form: Divergence,
) -> torch.Tensor:
    """Compute the divergence over the vocabulary, between softmax((logits + bias) / temperature) of the model and of
    `teacher`; where sampling kept a part of the vocabulary, both over that part, renormalised: the expectation, over
    what may be drawn there, of the difference of the log-probabilities that `token_quantities` gives of the two.

    Where the two heads have different numbers of rows (padding of one tokenizer's vocabulary), both distributions are
    over the ids that both have.

    Args:
        model: whose head is applied to `hidden`.
        hidden: [M, D].
        teacher: whose head is applied to `teacher_hidden`.
        teacher_hidden: [M, E], without gradient.
        targets: the distribution that each of the M tokens was drawn from.
        form: what is computed.

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
    model: Head,
    hidden: torch.Tensor,
    temperature: torch.Tensor,
    tops: tuple[torch.Tensor, torch.Tensor],
    form: Divergence,
) -> torch.Tensor:
    """Compute the divergence over a teacher's likeliest tokens and, as one outcome more, all others together. See
    `outcomes`.

    Args:
        model: whose head is applied to `hidden`.
        hidden: [M, D].
        temperature: [M] float32, above 0; the teacher's log-probabilities are of the same.
        tops: ids [M, K] int64 and log-probabilities [M, K], -1 and minus infinity where there are fewer.
        form: what is computed.

    Returns:
        [M], with gradient; 0 in a row without a token.
    """

    def chunk(rows: torch.Tensor, ids: torch.Tensor, logprobs: torch.Tensor, heat: torch.Tensor) -> torch.Tensor:
        log_p, log_q = outcomes(model.logits(rows) / heat[:, None], ids, logprobs)
        return between(log_p, log_q, form)

    return _in_chunks(chunk, *(rows.split(CHUNK_ROWS) for rows in (hidden, *tops, temperature)))


def outcomes(logits: torch.Tensor, ids: torch.Tensor, logprobs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a teacher's and the model's log-probabilities of K tokens and of the rest, which is one outcome.

    Merging outcomes never raises an f-divergence (log-sum inequality: Cover and Thomas, Elements of Information Theory,
    theorem 2.7.1), so what is found is a lower bound of the divergence over the vocabulary, equal to it where K = V;
    and unlike the top K alone, renormalised, it is 0 only where the model agrees about the rest, too (the bias of that:
    arXiv 2503.16870, section 3).

    Args:
        logits: [M, V], divided by the temperature.
        ids: [M, K] int64; -1, or one that the model does not have, belongs to the rest.
        logprobs: [M, K], the teacher's.

    Returns:
        log p [M, K + 1] and log q [M, K + 1], minus infinity where there is no outcome.
    """
    there = (ids >= 0) & (ids < logits.shape[1])
    has_ids = there.any(1)
    log_z = logits.logsumexp(1, keepdim=True)
    nothing = torch.full_like(log_z, -math.inf)
    log_q = torch.where(there, logits.gather(1, ids.where(there, 0)) - log_z, nothing)
    log_p = torch.where(there, logprobs.to(logits.dtype), nothing)
    taken = logits.new_zeros(len(logits), logits.shape[1] + 1, dtype=torch.bool)
    taken = taken.scatter(1, ids.where(there, logits.shape[1]), True)[:, :-1]
    some = (has_ids & ~taken.all(1))[:, None]
    # where nothing is left, something finite goes through logsumexp, whose gradient there would be no number
    rest = torch.where(some, logits.masked_fill(taken & some, -math.inf).logsumexp(1, keepdim=True) - log_z, nothing)
    log_rest = (1.0 - log_p.exp().sum(1, keepdim=True)).clamp(min=LEAST_REST).log()
    return torch.cat((log_p, torch.where(some, log_rest, nothing)), 1), torch.cat((log_q, rest), 1)


def between(log_p: torch.Tensor, log_q: torch.Tensor, form: Divergence) -> torch.Tensor:
    """Compute the divergence of two distributions over the same outcomes; 0 log 0 is 0.

        forward         KL(p || q) = sum p (log p - log q)
        reverse         KL(q || p)
        jensen_shannon  beta KL(p || m) + (1 - beta) KL(q || m), m = beta p + (1 - beta) q   (GKD, arXiv 2306.13649)

    Args:
        log_p: [M, O], the teacher's.
        log_q: [M, O], the model's.
        form: which, and beta.

    Returns:
        [M], with gradient for log_q.
    """
    if form.kind == "forward":
        return _kl(log_p, log_q)
    if form.kind == "reverse":
        return _kl(log_q, log_p)
    there = log_q > -math.inf  # merged from the same ids, so that both have the same outcomes
    p, q = (torch.where(there, values, 0.0) for values in (log_p, log_q))
    log_m = torch.where(there, torch.logaddexp(p + math.log(form.beta), q + math.log1p(-form.beta)), -math.inf)
    return form.beta * _kl(log_p, log_m) + (1.0 - form.beta) * _kl(log_q, log_m)


def _kl(log_a: torch.Tensor, log_b: torch.Tensor) -> torch.Tensor:
    """Compute KL(a || b) [M]. An outcome without probability under `a` adds nothing, whatever `b` says."""
    there = log_a > -math.inf
    a, b = (torch.where(there, values, 0.0) for values in (log_a, log_b))
    return torch.where(there, a.exp() * (a - b), 0.0).sum(1)


def _in_chunks(chunk: Callable[..., torch.Tensor], *columns: Iterable[object]) -> torch.Tensor:
    """Call `chunk` for some rows after the other; where there are gradients, it is computed again for them."""
    again = torch.is_grad_enabled()
    parts = [
        checkpoint(chunk, *rows, use_reentrant=False) if again else chunk(*rows) for rows in zip(*columns, strict=True)
    ]
    return torch.cat(parts)
