"""Held-out tasks before and after training, sampled at training temperature, with a 95 % interval."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from sparring.algo.annotate.domain import teacher_of
from sparring.errors import EvaluationFailed, refusal
from sparring.observe.evaluation import Evaluation
from sparring.protocols import Engine
from sparring.rollout.evaluate import EvalPlan, Finding, ScoredRunner, evaluate, recorded, summarize
from sparring.stages.context import POLICY, Context
from sparring.stages.models.teachers import OWN, teacher_folder
from sparring.stages.data.contamination import check_unseen
from sparring.types import Task


async def run(context: Context) -> dict[str, Any]:
    """Evaluate the final weights of every stage that `[eval] checkpoints` names and the run has.

    Returns:
        Per checkpoint, for `teacher/<name>` with `[eval] teachers`, and for `no_tool` (the last checkpoint with the
        tool host switched off), an `Evaluation` as plain data.

    Raises:
        EvaluationFailed: infrastructure or judge broke too many rollouts of one.
    """
    config = context.config.eval
    tasks = held_out(context, config.tasks)
    check_unseen(context, tasks)
    stages = [stage for stage in config.checkpoints if context.done(stage) is not None]
    results: dict[str, Any] = {}
    for stage in stages:
        results[stage] = await _once(context, stage, context.output(stage), tasks)
    for name, taught in _taught(context, tasks).items():
        results[f"teacher/{name}"] = await _once(
            context, f"teacher/{name}", teacher_folder(context, name), taught, model=name
        )
    if config.no_tool_tasks and stages:
        from sparring.sandbox.bubblewrap import BubblewrapBoxes

        off = BubblewrapBoxes(msgspec.structs.replace(context.config.sandbox, enabled=False))
        try:
            spread = _spread(tasks, config.no_tool_tasks)
            results["no_tool"] = await _once(context.with_boxes(off), "no_tool", context.output(stages[-1]), spread)
        finally:
            await off.close()
    return results


def held_out(context: Context, count: int, key: str = "eval.tasks") -> list[Task]:
    """The first `count` tasks of the environment's evaluation split; 0 takes all. `key` is where the count stands.

    Raises:
        BadInput: there are fewer.
    """
    source = context.factory.tasks("eval", context.config.run.seed)
    tasks: list[Task] = []
    while (not count or len(tasks) < count) and (task := source.next()) is not None:
        tasks.append(task)
    if len(tasks) < max(1, count):
        raise refusal(key, f"at most {len(tasks)}, the held-out tasks", str(count), "lower it, or raise env.held_out")
    return tasks


async def evaluate_folder(context: Context, folder: str, plan: EvalPlan, model: str = POLICY) -> Evaluation:
    """Evaluate a checkpoint folder, as that of `model`, going on from what the store has; an engine is made if that is
    not all.

    Raises:
        EvaluationFailed: more than `[eval] max_lost` of the rollouts were broken by infrastructure or judge.
        BadInput: the store has it of other tasks.
    """
    found = recorded(plan, context.store)
    if len(found) < len(plan):
        engine = context.cluster.engine(model, path=folder)
        try:
            found = await _sampled(context.played_by(model), engine, Path(folder), plan)
        finally:
            await engine.close()
    result = summarize(plan, found, context.config.eval.ks)
    check_lost(result, context.config.eval.max_lost, plan.stage)
    return result


def check_lost(result: Evaluation, most: float, name: str) -> None:
    """Whether enough is left to speak of a result.

    Raises:
        EvaluationFailed: too many rollouts were broken by infrastructure or judge; which and how.
    """
    if result.lost_share <= most:
        return
    some = "; ".join(f"{lost.rollout} ({lost.failure})" for lost in result.lost[:3])
    raise EvaluationFailed(
        f"{name}: expected at most {most:.1%} of rollouts broken by infrastructure or judge (eval.max_lost), got "
        f"{len(result.lost)} of {result.rollouts}: {some}{'; ...' if len(result.lost) > 3 else ''}; "
        "the same command runs only these again"
    )


async def _sampled(context: Context, engine: Engine, folder: Path, plan: EvalPlan) -> dict[int, Finding]:
    """Run what is missing, told to the sink under the plan's stage."""
    from sparring.stages.runtime.online import runner
    from sparring.stages.models.reward_scorers import scorers

    name, successes = plan.stage.replace("/", " "), 0

    def done(number: int, finding: Finding) -> None:
        nonlocal successes, ours
        successes, ours = successes + bool(finding.success), ours + 1
        context.sink.log(name, number, {"rollout/success": successes / ours})

    ours = 0
    context.sink.start(name, len(plan))
    return await evaluate(
        ScoredRunner(runner(context, engine, folder), scorers(context)),
        plan,
        store=context.store,
        max_concurrent_rollouts=context.config.eval.max_concurrent_rollouts,
        done=done,
    )


async def _once(
    context: Context, label: str, folder: Path, tasks: Sequence[Task], model: str = POLICY
) -> dict[str, Any]:
    """One evaluation, unless the run already has it."""
    found = context.store.get(f"eval/{label}")
    if found is not None:
        return found
    config = context.config
    plan = EvalPlan(tasks=tasks, run_seed=config.run.seed, samples=config.eval.samples, stage=f"eval/{label}")
    result = msgspec.to_builtins(await evaluate_folder(context, str(folder), plan, model))
    context.store.put(f"eval/{label}", result)
    return result


def _taught(context: Context, tasks: Sequence[Task]) -> dict[str, list[Task]]:
    """With `[eval] teachers`, by teacher other than the policy, those of `tasks` that it teaches."""
    stage = context.config.distill
    found: dict[str, list[Task]] = {}
    for task in tasks if context.config.eval.teachers and context.done("distill") is not None else ():
        if (name := teacher_of(stage.teachers, task)) not in OWN:
            found.setdefault(name, []).append(task)
    return dict(sorted(found.items()))


def _spread(tasks: Sequence[Task], count: int) -> list[Task]:
    """`count` tasks, evenly spaced over the list."""
    return [tasks[place * len(tasks) // count] for place in range(min(count, len(tasks)))]
