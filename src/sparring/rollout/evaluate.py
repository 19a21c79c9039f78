"""Evaluation: every held-out task once, beside training at a lower priority, never near a window or a baseline."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from sparring.observe.statistics import Interval, wilson
from sparring.rollout.runner import Finished, RolloutRunner
from sparring.rollout.scheduler import unscored
from sparring.rollout.seeds import rollout_seed
from sparring.types import Group, Score, Task

PRIORITY = -1
"""Below training's 0: the engine serves evaluation with what training leaves."""


class EvalStore(Protocol):
    """What an evaluation needs of the store, `SqliteStore` for one."""

    def append(self, *groups: Group, stage: str) -> None:
        """Record groups, all or none."""
        ...

    def truncate(self, stage: str, step: int, *, first_group: int = 0) -> None:
        """Let what was recorded after `step` count no longer."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class SuccessRate:
    """A rate over `tasks` tasks with its 95 % Wilson interval. None over no tasks."""

    success_rate: float | None
    interval: Interval
    tasks: int


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalResult:
    """What an evaluation found.

    Rates and means are over the tasks that were scored; `infra_failed` counts the others, which say nothing about the
    policy. A task of a world that knows no success (`Score.success` is None) counts in the means only.

    Attributes:
        overall: success over all tasks.
        by_tag: success by `Task.tag`.
        successes: by task id, for paired comparison with another evaluation.
        mean_reward: None where nothing was scored.
        mean_turns: model turns per rollout, None where nothing was scored.
        mean_turns_successful: the same over successful rollouts.
        outcomes: how many rollouts ended how, as `kind/reason`.
        infra_failed: tasks excluded because infrastructure or judge failed.
        versions: lowest and highest weight version that sampled a token, None where nothing was sampled.
    """

    overall: SuccessRate
    by_tag: Mapping[str, SuccessRate] = field(default_factory=dict)
    successes: Mapping[str, bool] = field(default_factory=dict)
    mean_reward: float | None = None
    mean_turns: float | None = None
    mean_turns_successful: float | None = None
    outcomes: Mapping[str, int] = field(default_factory=dict)
    infra_failed: int = 0
    versions: tuple[int, int] | None = None


async def evaluate(
    runner: RolloutRunner,
    tasks: Sequence[Task],
    *,
    run_seed: int,
    max_concurrent_rollouts: int,
    stage: str = "eval",
    store: EvalStore | None = None,
    done: Callable[[int, Finished], None] = lambda number, finished: None,
) -> EvalResult:
    """Run every task once.

    The seeds depend on the run and the task alone, so two evaluations of one run differ by their weights only and can be
    compared in pairs.

    Args:
        runner: runs one rollout.
        tasks: with unique ids.
        run_seed: everything sampled derives from it.
        max_concurrent_rollouts: rollouts in flight, at least 1.
        stage: first part of the rollouts' ids, and the stage that they are recorded under.
        store: where rollouts are recorded as groups of one, in the order of `tasks`, when all are done; they take the place
            of an earlier evaluation under the same stage, such as one that a crash cut off.
        done: called after each rollout with how many are finished.

    Raises:
        Exception: the first that killed a rollout and is no infrastructure failure.
    """
    if store is not None:
        store.truncate(stage, 0)
    slots = asyncio.Semaphore(max_concurrent_rollouts)
    finished: dict[int, Finished] = {}

    async def one(index: int, task: Task) -> None:
        async with slots:
            seed = rollout_seed(run_seed, "eval", task, 0)
            finished[index] = await runner.run(
                task, rollout_id=f"{stage}/{index}", index=0, seed=seed, purpose="eval", priority=PRIORITY
            )
        done(len(finished), finished[index])

    try:
        async with asyncio.TaskGroup() as group:
            for index, task in enumerate(tasks):
                group.create_task(one(index, task))
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    ordered = [_group(stage, index, task, finished[index]) for index, task in enumerate(tasks)]
    if store is not None:
        store.append(*ordered, stage=stage)
    return summarize(ordered)


def summarize(groups: Sequence[Group]) -> EvalResult:
    """The result over groups of one, such as `Store.groups(stage=...)` of a recorded evaluation."""
    scored = [(g, g.rollouts[0], g.scores[0]) for g in groups if g.rollouts]
    known = {g.task.id: (g.task.tag, bool(s.success)) for g, _, s in scored if s.success is not None}
    tags = sorted({tag for tag, _ in known.values() if tag})
    turns = [(sum(t.usage.turns for t in r.trajectories), s.success) for _, r, s in scored]
    last = [g.rollouts[0] if g.rollouts else g.failed[-1] for g in groups]
    versions = [
        v for r in last for t in r.trajectories for s in t.segments if s.versions is not None for v in s.versions.values
    ]
    return EvalResult(
        overall=_rate([success for _, success in known.values()]),
        by_tag={tag: _rate([success for of, success in known.values() if of == tag]) for tag in tags},
        successes={task: success for task, (_, success) in known.items()},
        mean_reward=_mean([s.reward for _, _, s in scored if s.reward is not None]),
        mean_turns=_mean([n for n, _ in turns]),
        mean_turns_successful=_mean([n for n, success in turns if success]),
        outcomes=dict(Counter(f"{r.outcome.kind}/{r.outcome.reason}" for r in last)),
        infra_failed=len(groups) - len(scored),
        versions=(min(versions), max(versions)) if versions else None,
    )


def _group(stage: str, index: int, task: Task, finished: Finished) -> Group:
    """A group of one, or of none where it left."""
    rollout, score = finished.rollout, finished.score
    scores: tuple[Score, ...] = (score,) if score is not None and score.reward is not None else ()
    if score is not None and not scores:
        rollout = unscored(rollout)
    return Group(
        id=f"{stage}/{index}",
        index=index,
        task=task,
        rollouts=(rollout,) if scores else (),
        scores=scores,
        failed=finished.broken if scores else (*finished.broken, rollout),
    )


def _rate(successes: Sequence[bool]) -> SuccessRate:
    n = len(successes)
    return SuccessRate(
        success_rate=sum(successes) / n if n else None, interval=wilson(sum(successes), n), tasks=n
    )


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
