"""Scored groups -> batches, one per optimiser step, with an account of every sampled token."""

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
"""Function that makes the rows of another learner, such as a critic, from the policy's credited rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Plan of an update: how its rows are divided into optimiser steps.

    A trajectory is trained in one step of each pass, with all its branches.

    Attributes:
        minibatches: optimiser steps per pass.
        seed: seed of the assignment of trajectories to steps.
        idle_rows: also train the policy's rows whose advantages are all 0, because a loss part without the advantage,
            such as a KL penalty, gives them a gradient.
        whole_trajectories: if one branch of a trajectory has an advantage, also train the trajectory's other branches,
            because their tokens enter its ratio.
        learners: functions that make the rows of other models, such as a critic, from the policy's rows, by model. In
            each optimiser step the batches of these models come before the policy's batch.
        warmup_steps: number of updates at the start of the run in which only the `learners` are trained.
    """

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
    """Yield the batches of each of `steps`, made from the next `groups_per_step` groups in their order (law 5).

    A group is taken only when the batch that needs it is requested. If the groups end early, the remaining groups make
    a last, smaller batch.

    Args:
        groups: scored groups in admission order.
        steps: numbers of the updates to do. Update n makes version n, so a fresh run of 100 updates has range(1, 101).
        model: name of the trained model; tokens of other models are context.
        annotators: functions that annotate samples before credit, in this order.
    """
    if groups_per_step < 1:
        raise ValueError(f"groups_per_step must be at least 1, got {groups_per_step}")
    for step in steps:
        update_groups: list[Group] = []
        async for group in groups:
            update_groups.append(group)
            if len(update_groups) == groups_per_step:
                break
        if not update_groups:
            return
        samples = [row for group in update_groups for row in flatten(group, model)]
        for annotator in annotators:
            samples = list(await annotator.annotate(samples))
        for batch in assemble(update_groups, samples, credit=credit, model=model, step=step, plan=plan):
            yield batch


def assemble(
    groups: Sequence[Group], samples: Sequence[Sample], *, credit: Credit, model: str, step: int, plan: Plan = Plan()
) -> list[Batch]:
    """Return the batches of one update, one for each of its optimiser steps and learners.

    The denominator of a term is the credit's, or the sum of the term's weights over all rows, including tokens and
    groups with advantages of 0. A row with weight in the policy term only and advantages of exactly 0 has no gradient:
    it counts in the denominator and is left out of `rows`, unless the plan keeps it. If no row of an update is left,
    its batch has no rows, and the trainer only advances its version.

    While a critic warms up, every advantage is 0 and no batch of the policy has rows.

    The last batch, after which weights are published, carries the account and the groups. A token counts once in the
    account, however often it is trained.

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
    for part in _divide(rows, plan, step):
        for learner, rows_of in plan.learners.items():
            learner_rows = rows_of(part)
            batches.append(_batch(step, learner, learner_rows, denominators(learner_rows)))
        policy_rows = [] if warming else _trained_rows(part, plan)
        batches.append(_batch(step, model, policy_rows, denominators(part, policy=credit.denominator(part))))
    last = replace(
        batches[-1], publish=True, ends_update=True, account=account, groups=tuple(group.id for group in groups)
    )
    return [*batches[:-1], last]


def _batch(step: int, model: str, rows: Sequence[Sample], totals: Mapping[str, float]) -> Batch:
    agreed(rows)
    return Batch(step=step, model=model, rows=tuple(rows), denominators=totals, publish=False, ends_update=False)


def _divide(rows: Sequence[Sample], plan: Plan, step: int) -> list[list[Sample]]:
    """Divide an update's rows into optimiser steps: in each pass the trajectories get a new random order and are cut
    into steps of nearly equal size."""
    if plan.minibatches == plan.passes == 1:
        return [list(rows)]
    units: dict[str, list[Sample]] = {}
    for row in rows:
        # both sides of a pair have to be in one step
        units.setdefault(row.trajectory if row.label is None else row.group, []).append(row)
    parts = []
    for number in range(plan.passes):
        order = sorted(
            units, key=lambda id: xxhash.xxh3_64_intdigest(f"parts/{plan.seed}/{step}/{number}/{id}".encode())
        )
        # empty parts stay, because the learning rate's schedule counts steps
        bounds = [len(order) * part // plan.minibatches for part in range(plan.minibatches + 1)]
        chosen_ids = [set(order[begin:end]) for begin, end in pairwise(bounds)]
        parts += [[row for id, own_rows in units.items() if id in chosen for row in own_rows] for chosen in chosen_ids]
    return parts


def _account(group: Group, before: Sequence[Sample], after: Sequence[Sample], model: str) -> TokenAccount:
    """Count the tokens of one group by use. Sampled tokens and used tokens are counted from different data, so a lost
    token makes the two counts differ."""
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
    """Count the row's tokens with weight in the term that trains sampled tokens: policy, preference or distill."""
    weights = row.weights.get("policy" if row.label is None else "preference") or row.weights.get("distill", ())
    return len(weights) - weights.count(0.0)


def _trained_tokens(row: Sample) -> int:
    """Count the tokens of `_policy_tokens` that have a gradient. Policy term: tokens with an advantage other than 0.
    Preference term: all tokens of a row with a label other than 0. Distill term: all tokens."""
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
    if plan.idle_rows:
        return list(rows)
    moved = {row.trajectory for row in rows if _has_gradient(row)} if plan.whole_trajectories else set[str]()
    return [row for row in rows if row.trajectory in moved or _has_gradient(row)]


def _has_gradient(row: Sample) -> bool:
    if row.label is not None:
        return row.label != 0
    others = (values for term, values in row.weights.items() if term != "policy")
    return _trained_tokens(row) > 0 or any(map(any, others))
