"""Evaluation: held-out tasks, each sampled once or several times, beside training in a share of its own, never near a
window or a baseline. What is recorded is not run again."""

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
    """Store as an evaluation needs it. `SqliteStore` is one."""

    def append(self, *groups: Group, stage: str) -> None:
        """Record groups, all or none."""
        ...

    def groups(self, *, stage: str | None = None) -> Iterable[Group]:
        """Return the groups of a stage that count."""
        ...

    def supersede(self, stage: str, number: int) -> None:
        """Let one group count no longer: it is done again."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalPlan:
    """Plan of an evaluation: its rollouts by number, every task once, then every task a second time, and so on.

    The seed of a rollout depends on `run_seed`, its task and which sample of it it is, on nothing else. So two
    evaluations differ by their weights only and can be compared in pairs, and one with more samples contains the one
    with fewer.

    Attributes:
        tasks: with unique ids.
        samples: per task.
        run_seed: everything sampled derives from it.
        stage: rollout 7 is `<stage>/7`, and recorded under `stage`.
        max_context: most ids that a prompt of the policy and its reply may have together; None: nobody knows.
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
    """Result of one rollout.

    `reward` is None where the rollout says nothing about the policy; `failure` is then what broke, empty where it ended
    at a limit before the policy had a turn, such as a prompt that is too long. `success` is None there too, and where
    the world knows no such thing. `versions` are the lowest and the highest of the weights, None where nothing was
    sampled. `shortfalls` are those of `rollout.metrics`.
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
    """Return the findings of an evaluation that the store has, by number.

    Rollouts that broke are superseded: they are run again. One that ended before the policy had a turn would again.

    Raises:
        BadInput: the record is of other tasks.
    """
    findings: dict[int, Finding] = {}
    for group in store.groups(stage=plan.stage):
        if group.index >= len(plan):
            continue
        task = plan.tasks[group.index % len(plan.tasks)]
        if digest(group.task) != digest(task):
            expected, got = f"{task.id} as it is now", f"{group.task.id} as it was, or another task"
            raise refusal(
                f"recorded rollout {group.id}", expected, got, "evaluate under another --name, or remove the folder"
            )
        if group.rollouts or group.failed[-1].outcome.trainable:
            findings[group.index] = _finding(group, plan)
        else:
            store.supersede(plan.stage, group.index)
    return findings


class ScoredRunner:
    """A runner whose rollouts are also scored by what scores whole groups in training, each as a group of one: a reward
    model says what it says, and what compares the answers of a group has nothing to compare.

    Args:
        runner: runs one rollout.
        scorers: in training's order.
    """

    def __init__(self, runner: RolloutRunner, scorers: Sequence[Scorer]) -> None:
        self._runner = runner
        self._scoring = GroupScoring(scorers, runner)

    async def run(
        self, task: Task, *, rollout_id: str, index: int, seed: int, purpose: Purpose = "eval", admission: int = 0
    ) -> Finished:
        """Run a task as the runner does, then score it. A scorer that fails is a judge that failed."""
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
    """Run what the store does not have. Each rollout is recorded, as a group of one, as soon as it is finished.

    Args:
        runner: runs one rollout.
        plan: which rollouts.
        max_concurrent_rollouts: rollouts in flight, at least 1.
        share: what bounds them further beside training; None where nothing else is sampled.
        store: the record; None keeps none.
        done: called after each rollout with how many the record has.

    Returns:
        The findings by number, earlier ones included.

    Raises:
        BadInput: the record is of other tasks.
        Exception: the first that killed a rollout and is no infrastructure failure.
    """
    findings = recorded(plan, store) if store is not None else {}
    missing = iter([number for number in range(len(plan)) if number not in findings])

    async def work() -> None:
        for number in missing:
            async with share or nullcontext():
                group = await _one(runner, plan, number, 0 if share is None else share.admission())
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
    """Return the result over the findings.

    Args:
        plan: of the evaluation.
        findings: as `evaluate` returns them.
        ks: for which pass@k and pass^k are computed.
    """
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
    """Return shares over all rollouts; those of nothing are left out."""
    metrics = Metrics()
    for name, (count, of) in (share for finding in findings for share in finding.shortfalls.items() if share[1][1]):
        metrics.add(name, count, "ratio", weight=of)
    return metrics.take()


async def _one(runner: RolloutRunner | ScoredRunner, plan: EvalPlan, number: int, admission: int) -> Group:
    """Run one rollout and return it as a group of one, or of none where it left."""
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
