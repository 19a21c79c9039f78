"""Held-out tasks before and after training, sampled at training temperature, with a 95 % interval."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from sparring.algo.annotate.domain import teacher_of
from sparring.rollout.evaluate import EvalPlan
from sparring.stages.context import POLICY, Context
from sparring.stages.data.contamination import check_unseen
from sparring.stages.models.teachers import OWN, teacher_folder
from sparring.stages.runtime.chosen import chosen_weights
from sparring.stages.runtime.evaluation import evaluate_folder, held_out
from sparring.stages.runtime.saved import BEST, LAST
from sparring.types import Task


async def run(context: Context) -> dict[str, Any]:
    """Evaluate the weights of every stage that `[eval] checkpoints` names and the run has: its best or its last
    (`[eval] weights`).

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
    folders = {stage: _weights(context, stage) for stage in stages}
    results: dict[str, Any] = {}
    for stage, folder in folders.items():
        results[stage] = await _once(context, stage, folder, tasks)
    for name, taught in _taught(context, tasks).items():
        results[f"teacher/{name}"] = await _once(
            context, f"teacher/{name}", teacher_folder(context, name), taught, model=name
        )
    if config.no_tool_tasks and stages:
        from sparring.sandbox.bubblewrap import BubblewrapBoxes

        off = BubblewrapBoxes(msgspec.structs.replace(context.config.sandbox, enabled=False))
        try:
            spread = _spread(tasks, config.no_tool_tasks)
            results["no_tool"] = await _once(context.with_boxes(off), "no_tool", folders[stages[-1]], spread)
        finally:
            await off.close()
    return results


def _weights(context: Context, stage: str) -> Path:
    """Return the weights of a stage that are evaluated. An evaluation that has begun goes on with those that it began
    with; before anybody noted which, they were the last.

    Raises:
        BadInput, StoreError: as `chosen_weights`.
    """
    key = f"eval/{stage}/weights"
    begun = next(iter(context.store.groups(stage=f"eval/{stage}")), None) is not None
    weights = (context.store.get(key) or LAST) if begun else context.config.eval.weights
    folder, which = chosen_weights(context, stage, weights)
    context.store.put(key, LAST if folder == context.output(stage) else BEST)
    if which:
        context.sink.event("eval", which)
    return folder


async def _once(
    context: Context, label: str, folder: Path, tasks: Sequence[Task], model: str = POLICY
) -> dict[str, Any]:
    """Return one evaluation, unless the run already has it."""
    recorded = context.store.get(f"eval/{label}")
    if recorded is not None:
        known: dict[str, Any] = recorded
        return known
    config = context.config
    plan = EvalPlan(tasks=tasks, run_seed=config.run.seed, samples=config.eval.samples, stage=f"eval/{label}")
    result: dict[str, Any] = msgspec.to_builtins(await evaluate_folder(context, str(folder), plan, model))
    context.store.put(f"eval/{label}", result)
    return result


def _taught(context: Context, tasks: Sequence[Task]) -> dict[str, list[Task]]:
    """Return `tasks` by the teacher that teaches them, the policy left out, for `[eval] teachers`."""
    stage = context.config.distill
    by_teacher: dict[str, list[Task]] = {}
    for task in tasks if context.config.eval.teachers and context.done("distill") is not None else ():
        if (name := teacher_of(stage.teachers, task)) not in OWN:
            by_teacher.setdefault(name, []).append(task)
    return dict(sorted(by_teacher.items()))


def _spread(tasks: Sequence[Task], count: int) -> list[Task]:
    return [tasks[place * len(tasks) // count] for place in range(min(count, len(tasks)))]
