"""Scored groups -> one batch per optimiser step, with the account of every sampled token."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from itertools import compress

from sparring.batch.denominators import denominators
from sparring.batch.flatten import flatten, sampled_tokens
from sparring.errors import SparringError
from sparring.protocols import Annotator, Credit, Store
from sparring.types import Batch, Group, Sample, TokenAccount


async def batches(
    groups: AsyncIterator[Group],
    *,
    steps: Iterable[int],
    groups_per_step: int,
    credit: Credit,
    model: str,
    annotators: Sequence[Annotator] = (),
    store: Store | None = None,
    stage: str = "rl",
) -> AsyncIterator[Batch]:
    """One batch for each of `steps`, of the next `groups_per_step` groups in the order they come (law 5).

    No group is taken before the batch that needs it is asked for. When the groups end early, what is left makes a last,
    smaller batch. A step's groups are appended to `store` in one commit when the last of them is there; their turns have
    been there since they ended.

    Args:
        groups: scored groups in admission order.
        steps: the steps still to do; where step n makes version n, a fresh run of 100 steps has range(1, 101).
        groups_per_step: tasks per optimiser step.
        credit: turns scores into advantages, over all groups of the step.
        model: the model that is trained; tokens of other models are context.
        annotators: add per-token values before credit, in this order.
        store: where groups are recorded.
        stage: under which they are recorded.

    Raises:
        SparringError: an annotator or the credit lost or doubled a token (law 7).
    """
    if groups_per_step < 1:
        raise ValueError(f"groups_per_step must be at least 1, got {groups_per_step}")
    for step in steps:
        taken: list[Group] = []
        async for group in groups:
            taken.append(group)
            if len(taken) == groups_per_step:
                break
        if not taken:
            return
        if store is not None:
            store.append(*taken, stage=stage)
        samples = [row for group in taken for row in flatten(group, model)]
        for annotator in annotators:
            samples = list(await annotator.annotate(samples))
        yield assemble(taken, samples, credit=credit, model=model, step=step)


def assemble(groups: Sequence[Group], samples: Sequence[Sample], *, credit: Credit, model: str, step: int) -> Batch:
    """The batch of one step.

    The denominator of a term is the sum of its weights over all groups that the credit kept, tokens of zero advantage
    included: DAPO's token mean (arXiv 2503.14476, equation 8, over the groups that dynamic sampling keeps). A row in which
    only the policy term has weight and every advantage is exactly zero adds nothing to the gradient; it counts in the denominator
    and is left out of `rows`. A step whose groups were all filtered has no rows: the trainer then only advances its version.

    Raises:
        SparringError: the account does not balance.
    """
    of_group = [[row for row in samples if row.group == group.id] for group in groups]
    kept = credit.credit(groups, of_group)
    account = TokenAccount()
    for group, before, after in zip(groups, of_group, kept, strict=True):
        account += _account(group, before, after, model)
    rows = [row for after in kept for row in after]
    return Batch(
        step=step,
        model=model,
        rows=tuple(row for row in rows if _has_gradient(row)),
        denominators=denominators(rows),
        account=account,
        groups=tuple(group.id for group in groups),
    )


def _account(group: Group, before: Sequence[Sample], after: Sequence[Sample], model: str) -> TokenAccount:
    """Where the tokens of one group went. Each side is counted from its own source, so a loss on the way shows."""
    failed = sampled_tokens(group.failed, model)
    trained = sum(_trained_tokens(row) for row in after)
    account = TokenAccount(
        sampled=sampled_tokens(group.rollouts, model) + failed,
        trained=trained,
        filtered=0 if after else sum(_policy_tokens(row) for row in before),
        zero_advantage=sum(_policy_tokens(row) for row in after) - trained,
        failed=failed,
    )
    if not account.balanced:
        raise SparringError(
            f"group {group.id}: expected sampled = trained + filtered + zero_advantage + failed, got {account}; "
            "an annotator or the credit dropped, doubled or re-weighted rows: it may only set values on the rows it is given"
        )
    return account


def _policy_tokens(row: Sample) -> int:
    """Tokens with weight in the term that trains what the policy sampled: the policy's own, or the distill term in its place."""
    weights = row.weights.get("policy") or row.weights.get("distill", ())
    return len(weights) - weights.count(0.0)


def _trained_tokens(row: Sample) -> int:
    """Of these, all that the distill term weighs, or those whose advantage is not exactly zero."""
    if "policy" not in row.weights and "distill" in row.weights:
        return _policy_tokens(row)
    if row.advantages is None:
        raise SparringError(f"sample {row.id}: expected advantages from the credit, got none; set them or drop the whole group")
    weighted = list(compress(row.advantages, row.weights["policy"]))
    return len(weighted) - weighted.count(0.0)


def _has_gradient(row: Sample) -> bool:
    others = (values for term, values in row.weights.items() if term != "policy")
    return _trained_tokens(row) > 0 or any(map(any, others))
