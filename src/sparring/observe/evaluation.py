"""Results of evaluations as plain numbers, and comparisons between them. Standard library only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from sparring.errors import refusal
from sparring.observe.statistics import (
    Estimate,
    mean,
    paired_difference,
    paired_mean_difference,
    paired_ratio,
    pass_at_k,
    pass_hat_k,
    rate,
)

SAME = "evaluate both on one recipe, with one run.seed"
Verdict = Literal["held", "regressed", "undecided"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskResult:
    """Result of one task's scored samples. Samples that infrastructure or judge broke are left out: they do not measure
    the policy.

    Attributes:
        digest: digest of the task's contents, so that only equal tasks are compared.
        tag: component of the mixture.
        rewards: rewards of the scored samples.
        solved: successes of the scored samples, in a world that reports success.
        by_role: rewards of the scored samples by role, if roles have rewards of their own.
    """

    digest: str
    tag: str = ""
    rewards: tuple[float, ...] = ()
    solved: tuple[bool, ...] = ()
    by_role: Mapping[str, tuple[float, ...]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Lost:
    """Rollout that infrastructure or judge broke, with its task and failure."""

    rollout: str
    task: str
    failure: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """Result of an evaluation; `tasks` has the results by task id. Every task has the same weight, whatever its number
    of scored samples. `rollouts` is the number of rollouts, including the broken rollouts `lost`.

    Attributes:
        success: share of samples that solve their task (pass@1).
        reward: mean reward of the samples.
        pass_at: pass@k by k, over the tasks with at least k scored samples.
        pass_hat: pass^k by k, over the same tasks.
        by_tag: `success` by `Task.tag`.
        by_role: mean reward by role, if roles have rewards of their own.
        samples: number of samples per task.
        mean_turns: model turns per scored rollout; None without scored rollouts.
        mean_turns_successful: model turns per successful rollout.
        outcomes: number of rollouts by outcome, as `kind/reason`.
        versions: lowest and highest weight version that sampled a token; None without sampled tokens.
        shortfalls: shares that training reports as `rollout/nothing_to_train`, `unread_calls`, `cut_by_...`;
            without those that are undefined.
    """

    success: Estimate
    reward: Estimate
    pass_at: Mapping[str, Estimate] = field(default_factory=dict)
    pass_hat: Mapping[str, Estimate] = field(default_factory=dict)
    by_tag: Mapping[str, Estimate] = field(default_factory=dict)
    by_role: Mapping[str, Estimate] = field(default_factory=dict)
    samples: int = 1
    rollouts: int = 0
    lost: tuple[Lost, ...] = ()
    mean_turns: float | None = None
    mean_turns_successful: float | None = None
    outcomes: Mapping[str, int] = field(default_factory=dict)
    versions: tuple[int, int] | None = None
    shortfalls: Mapping[str, float] = field(default_factory=dict)
    tasks: Mapping[str, TaskResult] = field(default_factory=dict)

    @property
    def lost_share(self) -> float:
        """Share of rollouts that broke."""
        return len(self.lost) / self.rollouts if self.rollouts else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Changes from one evaluation to another, over the tasks that both scored.

    Attributes:
        left_out: ids of the tasks that only one of the two scored.
        changes: changes by figure (success, reward, reward/<role>, pass@k, pass^k): the second's value minus the
            first's, with its interval.
    """

    tasks: int
    left_out: tuple[str, ...] = ()
    changes: Mapping[str, Estimate] = field(default_factory=dict)

    @property
    def figure(self) -> str:
        """Name of the decisive figure: success, or reward in a world that reports no success."""
        return "success" if "success" in self.changes else "reward"


def success_rate(tasks: Sequence[TaskResult]) -> Estimate:
    """Return the share of samples that solve their task, averaged over tasks."""
    scored = [task for task in tasks if task.solved]
    return rate([sum(task.solved) / len(task.solved) for task in scored], sum(len(task.solved) for task in scored))


def mean_reward(tasks: Sequence[TaskResult]) -> Estimate:
    """Return the mean reward, averaged over tasks."""
    return mean([sum(task.rewards) / len(task.rewards) for task in tasks if task.rewards])


def passes(tasks: Sequence[TaskResult], k: int, estimator: Callable[[int, int, int], float]) -> Estimate:
    """Return pass@k or pass^k, as `estimator` computes (`pass_at_k`, `pass_hat_k`), over the tasks with at least `k`
    scored samples."""
    scored = [task for task in tasks if len(task.solved) >= k]
    values = [estimator(len(task.solved), sum(task.solved), k) for task in scored]
    return rate(values, sum(len(task.solved) / k for task in scored))


def success_by_tag(tasks: Sequence[TaskResult]) -> dict[str, Estimate]:
    """Return `success_rate` of each tag with scored tasks."""
    tags = sorted({task.tag for task in tasks if task.tag and task.solved})
    return {tag: success_rate([task for task in tasks if task.tag == tag]) for tag in tags}


def reward_by_role(tasks: Sequence[TaskResult]) -> dict[str, Estimate]:
    """Return `mean_reward` of each role, in the order in which tasks name them."""
    roles = dict.fromkeys(role for task in tasks for role in task.by_role)
    earned = {role: [_reward_of(task, role) for task in tasks] for role in roles}
    return {role: mean([reward for reward in of_role if reward is not None]) for role, of_role in earned.items()}


def narrowed(evaluation: Evaluation, other: Evaluation) -> Evaluation:
    """Return `evaluation` restricted to the tasks that both evaluations scored: success, reward, success by tag, reward
    by role, tasks."""
    both = sorted(_scored_tasks(evaluation) & _scored_tasks(other))
    results = [evaluation.tasks[name] for name in both]
    tasks = dict(zip(both, results, strict=True))
    return replace(
        evaluation,
        success=success_rate(results),
        reward=mean_reward(results),
        by_tag=success_by_tag(results),
        by_role=reward_by_role(results),
        tasks=tasks,
    )


def compare(before: Evaluation, after: Evaluation) -> Comparison:
    """Compare two evaluations task by task, so that the difficulty of a task, common to both, adds no noise (Miller
    2024, paired differences).

    Raises:
        BadInput: the tasks of the evaluations differ, or no task was scored in both.
    """
    _check_same(before, after)
    changes: dict[str, Estimate] = {}
    solved, rewards = _paired_values(before, after, _success_of), _paired_values(before, after, _reward_of_task)
    if solved[0]:
        changes["success"] = paired_difference(*solved, _samples(before, after))
    if rewards[0]:
        changes["reward"] = paired_mean_difference(*rewards)
    for role in before.by_role:
        rewards_of_role = _paired_values(before, after, partial(_reward_of, role=role))
        if rewards_of_role[0]:
            changes[f"reward/{role}"] = paired_mean_difference(*rewards_of_role)
    for sign, estimator, figures in (("@", pass_at_k, before.pass_at), ("^", pass_hat_k, before.pass_hat)):
        for k in sorted(map(int, figures)):
            pair = _paired_values(before, after, partial(_passes, k=k, estimator=estimator))
            if pair[0]:
                changes[f"pass{sign}{k}"] = paired_difference(*pair, _samples(before, after, k))
    if not changes:
        raise _nothing_in_common(before, after)
    scored = _scored_tasks(before), _scored_tasks(after)
    return Comparison(tasks=len(scored[0] & scored[1]), left_out=tuple(sorted(scored[0] ^ scored[1])), changes=changes)


def retained_share(before: Evaluation, after: Evaluation) -> Estimate:
    """Return the share of the success of `before` that `after` retains, over the tasks that both scored."""
    _check_same(before, after)
    solved = _paired_values(before, after, _success_of)
    if not solved[0]:
        raise _nothing_in_common(before, after)
    return paired_ratio(*solved)


def verdict(change: Estimate, margin: float) -> Verdict:
    """Decide by the whole 95 % interval whether a figure held, or fell by more than `margin`; undecided if the interval
    contains -margin."""
    if change.interval is None:
        return "undecided"
    low, high = change.interval
    return "held" if low >= -margin else "regressed" if high < -margin else "undecided"


def _scored_tasks(evaluation: Evaluation) -> set[str]:
    return {name for name, task in evaluation.tasks.items() if task.rewards}


def _check_same(before: Evaluation, after: Evaluation) -> None:
    for name in before.tasks.keys() & after.tasks.keys():
        if before.tasks[name].digest != after.tasks[name].digest:
            raise refusal("comparison", "two evaluations of the same tasks", f"two different tasks called {name}", SAME)


def _nothing_in_common(before: Evaluation, after: Evaluation) -> Exception:
    actual = f"none among {len(_scored_tasks(before))} and {len(_scored_tasks(after))} scored ones"
    return refusal("comparison", "tasks that both evaluations scored", actual, SAME)


def _paired_values(
    before: Evaluation, after: Evaluation, figure: Callable[[TaskResult], float | None]
) -> tuple[list[float], list[float]]:
    """Return a figure of every task that has it in both evaluations, in the same order."""
    names = sorted(before.tasks.keys() & after.tasks.keys())
    pairs = [(figure(before.tasks[name]), figure(after.tasks[name])) for name in names]
    scored = [(b, a) for b, a in pairs if b is not None and a is not None]
    return [b for b, _ in scored], [a for _, a in scored]


def _samples(before: Evaluation, after: Evaluation, k: int = 1) -> float:
    """Return the number of independent trials of `k` samples over common tasks, with the smaller number of samples for
    each task."""
    names = before.tasks.keys() & after.tasks.keys()
    counts = (min(len(before.tasks[name].solved), len(after.tasks[name].solved)) for name in names)
    return sum(count / k for count in counts if count >= k)


def _success_of(task: TaskResult) -> float | None:
    return sum(task.solved) / len(task.solved) if task.solved else None


def _reward_of_task(task: TaskResult) -> float | None:
    return sum(task.rewards) / len(task.rewards) if task.rewards else None


def _reward_of(task: TaskResult, role: str) -> float | None:
    rewards = task.by_role.get(role)
    return sum(rewards) / len(rewards) if rewards else None


def _passes(task: TaskResult, k: int, estimator: Callable[[int, int, int], float]) -> float | None:
    return estimator(len(task.solved), sum(task.solved), k) if len(task.solved) >= k else None
