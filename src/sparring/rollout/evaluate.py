"""Evaluation: sampling each held-out task once or several times. It runs alongside training with its own share of the
rollouts, and never enters the window or a baseline. Recorded rollouts are not run again."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Protocol

from sparring.errors import InfraError, refusal
from sparring.observe.evaluation import (
    Evaluation,
    Lost,
    TaskResult,
    mean_reward,
    passes,
    reward_by_role,
    success_by_tag,
    success_rate,
)
from sparring.observe.metrics import Metrics
from sparring.observe.statistics import pass_at_k, pass_hat_k
from sparring.protocols import Scorer
from sparring.rollout.group_scoring import GroupScoring
from sparring.rollout.load import EvalShare
from sparring.rollout.metrics import Shares, shortfalls
from sparring.rollout.outcomes import failure_of, unscored
from sparring.rollout.runner import Finished, RolloutRunner
from sparring.rollout.seeds import digest, rollout_seed
from sparring.types import POLICY, Group, Outcome, Purpose, Score, Task


class EvalStore(Protocol):
    """Store of an evaluation's groups. `SqliteStore` implements it."""

    def append(self, *groups: Group, stage: str) -> None:
        """Record all groups in one transaction."""
        ...

    def groups(self, *, stage: str) -> Iterable[Group]:
        """Return the groups of a stage that are not superseded."""
        ...

    def supersede(self, stage: str, number: int) -> None:
        """Mark a group as superseded; it will be run again."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalPlan:
    """Plan of an evaluation: a numbered list of rollouts. Every task comes once, then every task a second time, and so
    on.

    The seed of a rollout depends only on `run_seed`, its task, and the number of the sample of this task. So two
    evaluations differ only by their weights and can be compared in pairs, and an evaluation with more samples contains
    the one with fewer.

    Attributes:
        tasks: tasks to evaluate, with unique ids.
        run_seed: seed that all sampling derives from.
        stage: stage under which groups are recorded; the id of rollout 7 is `<stage>/7`.
        max_context: maximum number of tokens of a prompt and its reply together; None if it is unknown.
    """

    tasks: Sequence[Task]
    run_seed: int
    samples: int = 1
    stage: str = "eval"
    max_context: int | None = None

    def __len__(self) -> int:
        return len(self.tasks) * self.samples


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """Result of one rollout of an evaluation.

    Attributes:
        success: success of the rollout; None if the environment reports no success, or if `reward` is None.
        reward: reward of the rollout; None if the rollout says nothing about the policy.
        ending: reason of the outcome.
        failure: failure of the infrastructure, for a rollout without a reward. Empty if a limit ended the rollout
            before the policy's first turn, such as a prompt that is too long.
        versions: lowest and highest version of the sampling weights; None if no token was sampled.
        shortfalls: counts of `rollout.metrics.shortfalls`.
    """

    rollout: str
    success: bool | None
    reward: float | None
    turns: int
    ending: str
    failure: str
    versions: tuple[int, int] | None
    per_role: Mapping[str, float] = field(default_factory=dict)
    shortfalls: Shares = field(default_factory=dict)


def recorded(plan: EvalPlan, store: EvalStore) -> dict[int, Finding]:
    """Return the recorded findings of an evaluation, by number of the rollout.

    Rollouts that the infrastructure broke are superseded, so that they run again. A rollout that a limit ended before
    the policy's first turn is kept, because it would end in the same way. Raises BadInput if the recorded rollouts are
    of other tasks."""
    findings: dict[int, Finding] = {}
    for group in store.groups(stage=plan.stage):
        if group.index >= len(plan):
            continue
        task = plan.tasks[group.index % len(plan.tasks)]
        if digest(group.task) != digest(task):
            expected, recorded = f"{task.id} as it is now", f"{group.task.id} as it was, or another task"
            raise refusal(
                f"recorded rollout {group.id}",
                expected,
                recorded,
                "evaluate under another --name, or remove the folder",
            )
        if group.rollouts or group.failed[-1].outcome.trainable:
            findings[group.index] = _finding(group, plan)
        else:
            store.supersede(plan.stage, group.index)
    return findings


class ScoredRunner:
    """Runner that scores each rollout with training's group scorers, as a group of one. A reward model gives its
    reward; a scorer that compares answers has nothing to compare.

    Args:
        scorers: scorers in training's order.
    """

    def __init__(self, runner: RolloutRunner, scorers: Sequence[Scorer]) -> None:
        self._runner = runner
        self._scoring = GroupScoring(scorers, runner)

    async def run(
        self, task: Task, *, rollout_id: str, index: int, seed: int, purpose: Purpose = "eval", admission: int = 0
    ) -> Finished:
        """Run a task, then score its rollout. If a scorer fails, the outcome is `judge_failed`."""
        finished = await self._runner.run(
            task, rollout_id=rollout_id, index=index, seed=seed, purpose=purpose, admission=admission
        )
        if finished.score is None:
            return finished
        try:
            scores = await self._scoring.scores(task, [finished.rollout], [finished.score])
        except InfraError as error:
            outcome = Outcome(kind="judge_failed", reason="failure", failure=failure_of(error))
            return replace(finished, rollout=unscored(finished.rollout, outcome), score=None)
        return replace(finished, score=scores[0])


async def evaluate(
    runner: RolloutRunner | ScoredRunner,
    plan: EvalPlan,
    *,
    max_concurrent_rollouts: int,
    share: EvalShare | None = None,
    store: EvalStore | None = None,
    done: Callable[[int, Finding], None] = lambda number, finding: None,
) -> dict[int, Finding]:
    """Run the rollouts of a plan that are not in the store. Each rollout is recorded as a group of one when it
    finishes.

    Args:
        share: limit on concurrent rollouts alongside training; None if there is no training.
        store: store of the groups; None records nothing.
        done: called after each rollout with the number of findings so far and the rollout's finding.

    Returns:
        The findings by number of the rollout, recorded ones included.

    Raises:
        BadInput: the recorded rollouts are of other tasks.
        Exception: first error of a rollout that is no failure of the infrastructure.
    """
    findings = recorded(plan, store) if store is not None else {}
    missing = iter([number for number in range(len(plan)) if number not in findings])

    async def work() -> None:
        for number in missing:
            async with share or nullcontext():
                group = await _run_one(runner, plan, number, 0 if share is None else share.admission())
            if store is not None:
                store.append(group, stage=plan.stage)
            findings[number] = _finding(group, plan)
            done(len(findings), findings[number])

    try:
        async with asyncio.TaskGroup() as workers:
            for _ in range(min(max_concurrent_rollouts, len(plan) - len(findings))):
                workers.create_task(work())
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return dict(sorted(findings.items()))


def summarize(plan: EvalPlan, findings: Mapping[int, Finding], ks: Sequence[int] = ()) -> Evaluation:
    """Return the metrics of an evaluation. `ks`: values of k for pass@k and pass^k."""
    by_task: dict[int, list[Finding]] = defaultdict(list)
    for number, finding in sorted(findings.items()):
        by_task[number % len(plan.tasks)].append(finding)
    tasks = {plan.tasks[place].id: _task_result(plan.tasks[place], by_task[place]) for place in sorted(by_task)}
    results = list(tasks.values())
    scored = [f for f in findings.values() if f.reward is not None]
    sampled = [f.versions for f in findings.values() if f.versions is not None]
    return Evaluation(
        success=success_rate(results),
        reward=mean_reward(results),
        pass_at={str(k): passes(results, k, pass_at_k) for k in ks},
        pass_hat={str(k): passes(results, k, pass_hat_k) for k in ks},
        by_tag=success_by_tag(results),
        by_role=reward_by_role(results),
        samples=plan.samples,
        rollouts=len(findings),
        lost=tuple(
            Lost(rollout=f.rollout, task=plan.tasks[number % len(plan.tasks)].id, failure=f.failure)
            for number, f in sorted(findings.items())
            if f.failure
        ),
        mean_turns=_mean([f.turns for f in scored]),
        mean_turns_successful=_mean([f.turns for f in scored if f.success]),
        outcomes=dict(Counter(f.ending for f in findings.values())),
        versions=(min(low for low, _ in sampled), max(high for _, high in sampled)) if sampled else None,
        shortfalls=_shares(findings.values()),
        tasks=tasks,
    )


def _shares(findings: Iterable[Finding]) -> dict[str, float]:
    """Return the shares of `shortfalls` over all rollouts, without those whose denominator is 0."""
    metrics = Metrics()
    for name, (count, of) in (share for finding in findings for share in finding.shortfalls.items() if share[1][1]):
        metrics.add(name, count, "ratio", weight=of)
    return metrics.take()


async def _run_one(runner: RolloutRunner | ScoredRunner, plan: EvalPlan, number: int, admission: int) -> Group:
    """Run one rollout and return it as a group, whose only rollout is in `failed` if it has no score."""
    sample, place = divmod(number, len(plan.tasks))
    task, name = plan.tasks[place], f"{plan.stage}/{number}"
    seed = rollout_seed(plan.run_seed, "eval", task, sample)
    finished: Finished = await runner.run(
        task, rollout_id=name, index=sample, seed=seed, purpose="eval", admission=admission
    )
    rollout, score = finished.rollout, finished.score
    scores: tuple[Score, ...] = (score,) if score is not None and score.reward is not None else ()
    if score is not None and not scores:
        rollout = unscored(rollout)
    return Group(
        id=name,
        index=number,
        task=task,
        rollouts=(rollout,) if scores else (),
        scores=scores,
        failed=finished.broken if scores else (*finished.broken, rollout),
    )


def _finding(group: Group, plan: EvalPlan) -> Finding:
    rollout = group.rollouts[0] if group.rollouts else group.failed[-1]
    score = group.scores[0] if group.rollouts else Score(reward=None)
    outcome = rollout.outcome
    versions = [
        version
        for trajectory in rollout.trajectories
        for segment in trajectory.segments
        if segment.versions is not None and segment.model == POLICY
        for version in segment.versions.values
    ]
    broken = outcome.failure if not group.rollouts else None
    return Finding(
        rollout=rollout.id,
        success=score.success,
        reward=score.reward,
        turns=sum(t.usage.turns for t in rollout.trajectories),
        ending=f"{outcome.kind}/{outcome.reason}",
        failure=f"{broken.error}: {broken.where}: {broken.message}"
        if broken
        else ""
        if outcome.trainable
        else outcome.reason,
        versions=(min(versions), max(versions)) if versions else None,
        per_role=score.per_role or {},
        shortfalls=shortfalls(group, plan.max_context),
    )


def _task_result(task: Task, findings: Sequence[Finding]) -> TaskResult:
    return TaskResult(
        digest=digest(task),
        tag=task.tag,
        rewards=tuple(f.reward for f in findings if f.reward is not None),
        solved=tuple(f.success for f in findings if f.success is not None),
        by_role={
            role: tuple(f.per_role[role] for f in findings if role in f.per_role)
            for role in dict.fromkeys(role for f in findings for role in f.per_role)
        },
    )


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
