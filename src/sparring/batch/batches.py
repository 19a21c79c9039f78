"""Scored groups -> batches, one per optimiser step, with the account of every sampled token."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress, pairwise

import xxhash

from sparring.batch.annotations import agreed
from sparring.batch.critic import without_advantage
from sparring.batch.denominators import denominators
from sparring.batch.flatten import flatten, sampled_tokens
from sparring.errors import SparringError
from sparring.protocols import Annotator, Credit
from sparring.types import Batch, Group, Sample, TokenAccount

Rows = Callable[[Sequence[Sample]], list[Sample]]
"""Credited rows of the policy -> those of a model that learns beside it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Plan of an update: `passes` over the rows of its groups, each in `minibatches` optimiser steps. A trajectory is
    in one step of a pass, with all its branches; `seed` decides which. With `idle_rows` the policy's rows without any
    advantage are trained too, because something beside the advantage moves their tokens; with `whole_trajectories`
    those of which another branch has an advantage, because their tokens are in its ratio. `learners` are models that
    learn from rollouts beside the policy, such as a critic: each batch of the policy follows one of theirs, of the same
    rollouts. Through the first `warmup_steps` updates they alone learn."""

    passes: int = 1
    minibatches: int = 1
    seed: int = 0
    idle_rows: bool = False
    whole_trajectories: bool = False
    learners: Mapping[str, Rows] = field(default_factory=dict)
    warmup_steps: int = 0


async def batches(
    groups: AsyncIterator[Group],
    *,
    steps: Iterable[int],
    groups_per_step: int,
    credit: Credit,
    model: str,
    annotators: Sequence[Annotator] = (),
    plan: Plan = Plan(),
) -> AsyncIterator[Batch]:
    """Yield the batches of each of `steps`, one or as many as `plan` says, made of the next `groups_per_step` groups in
    the order they come (law 5).

    No group is taken before the batch that needs it is asked for. When the groups end early, what is left makes a last,
    smaller batch.

    Args:
        groups: scored groups in admission order.
        steps: the updates still to do; where update n makes version n, a fresh run of 100 has range(1, 101).
        groups_per_step: tasks per update.
        credit: turns scores into advantages, over all groups of the step.
        model: the model that is trained; tokens of other models are context.
        annotators: add per-token values before credit, in this order.
        plan: how an update is made of its groups.

    Raises:
        SparringError: an annotator or the credit lost or doubled a token (law 7), or annotated some rows and others
            not.
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
        samples = [row for group in taken for row in flatten(group, model)]
        for annotator in annotators:
            samples = list(await annotator.annotate(samples))
        for batch in assemble(taken, samples, credit=credit, model=model, step=step, plan=plan):
            yield batch


def assemble(
    groups: Sequence[Group], samples: Sequence[Sample], *, credit: Credit, model: str, step: int, plan: Plan = Plan()
) -> list[Batch]:
    """Return the batches of one update: one, or `plan.passes` times `plan.minibatches`, each an optimiser step of its
    own.

    The denominator of a term is the sum of its weights over all rows of the batch (or what the credit says), tokens of
    zero advantage included, also those of groups in which every advantage is zero. A row in which only the policy term
    has weight and every advantage is exactly zero adds nothing to the gradient; unless the plan keeps it, it counts in
    the denominator and is left out of `rows`. An update of which no row is left has one batch without rows: the trainer
    then only advances its version.

    While a critic warms up every advantage is zero and no batch of the policy has rows.

    The account and the groups stand on the last batch, which is the one that is published. A token counts there once,
    however often it is passed.

    Raises:
        SparringError: the account does not balance, or rows of one batch carry different annotations.
    """
    of_group = [[row for row in samples if row.group == group.id] for group in groups]
    warming = step <= plan.warmup_steps
    credited = credit.credit(groups, of_group)
    if warming:
        credited = [without_advantage(after) for after in credited]
    account = TokenAccount()
    for group, before, after in zip(groups, of_group, credited, strict=True):
        account += _account(group, before, after, model)
    rows = [row for after in credited for row in after]
    batches = []
    for part in _parts(rows, plan, step):
        for learner, rows_of in plan.learners.items():
            taught = rows_of(part)
            batches.append(_batch(step, learner, taught, denominators(taught)))
        trained = [] if warming else _trained_rows(part, plan)
        batches.append(_batch(step, model, trained, denominators(part, policy=credit.denominator(part))))
    last = replace(
        batches[-1], publish=True, ends_update=True, account=account, groups=tuple(group.id for group in groups)
    )
    return [*batches[:-1], last]


def _batch(step: int, model: str, rows: Sequence[Sample], totals: Mapping[str, float]) -> Batch:
    """Make the batch of one optimiser step within an update."""
    agreed(rows)
    return Batch(step=step, model=model, rows=tuple(rows), denominators=totals, publish=False, ends_update=False)


def _parts(rows: Sequence[Sample], plan: Plan, step: int) -> list[list[Sample]]:
    """Deal the rows of an update out to optimiser steps: for every pass the trajectories in an order drawn anew, in
    parts of nearly equal size."""
    if plan.minibatches == plan.passes == 1:
        return [list(rows)]
    units: dict[str, list[Sample]] = {}
    for row in rows:
        # the two of a pair are compared with each other
        units.setdefault(row.trajectory if row.label is None else row.group, []).append(row)
    parts = []
    for number in range(plan.passes):
        order = sorted(
            units, key=lambda id: xxhash.xxh3_64_intdigest(f"parts/{plan.seed}/{step}/{number}/{id}".encode())
        )
        # as many as ever, some of them empty: the learning rate's schedule counts them
        bounds = [len(order) * part // plan.minibatches for part in range(plan.minibatches + 1)]
        dealt = [set(order[begin:end]) for begin, end in pairwise(bounds)]
        parts += [[row for id, own_rows in units.items() if id in chosen for row in own_rows] for chosen in dealt]
    return parts


def _account(group: Group, before: Sequence[Sample], after: Sequence[Sample], model: str) -> TokenAccount:
    """Count the tokens of one group by their use. Each side is counted from its own source, so a lost token shows."""
    failed = sampled_tokens(group.failed, model)
    trained = sum(_trained_tokens(row) for row in after)
    account = TokenAccount(
        sampled=sampled_tokens(group.rollouts, model) + failed,
        trained=trained,
        filtered=0 if after else sum(_policy_tokens(row) for row in before),
        zero_advantage=sum(_policy_tokens(row) for row in after) - trained,
        failed=failed,
        auxiliary=sampled_tokens(group.rollouts, model, "auxiliary"),
        lost=sampled_tokens(group.rollouts, model, "lost"),
    )
    if not account.balanced:
        raise SparringError(
            f"group {group.id}: expected sampled = trained + filtered + zero_advantage + failed + auxiliary + lost, "
            f"got {account}; an annotator or the credit dropped, doubled or re-weighted rows: it may only set values "
            "on its rows"
        )
    return account


def _policy_tokens(row: Sample) -> int:
    """Count the tokens with weight in the term that trains sampled tokens: the policy term, or in its place the
    preference term or the distill term."""
    weights = row.weights.get("policy" if row.label is None else "preference") or row.weights.get("distill", ())
    return len(weights) - weights.count(0.0)


def _trained_tokens(row: Sample) -> int:
    """Count those of them whose advantage is not exactly zero; of compared rows, those with a label that is not; all
    that the distill term weighs."""
    if row.label is not None:
        return _policy_tokens(row) if row.label else 0
    if "policy" not in row.weights and "distill" in row.weights:
        return _policy_tokens(row)
    if row.advantages is None:
        raise SparringError(
            f"sample {row.id}: expected advantages from the credit, got none; set them or drop the whole group"
        )
    weighted = list(compress(row.advantages, row.weights.get("policy", ())))
    return len(weighted) - weighted.count(0.0)


def _trained_rows(rows: Sequence[Sample], plan: Plan) -> list[Sample]:
    """Return the rows that have a part in the gradient of an optimiser step."""
    if plan.idle_rows:
        return list(rows)
    moved = {row.trajectory for row in rows if _has_gradient(row)} if plan.whole_trajectories else set[str]()
    return [row for row in rows if row.trajectory in moved or _has_gradient(row)]


def _has_gradient(row: Sample) -> bool:
    if row.label is not None:
        return row.label != 0
    others = (values for term, values in row.weights.items() if term != "policy")
    return _trained_tokens(row) > 0 or any(map(any, others))
