"""The eval stage: held-out tasks before and after training, sampled at training temperature, with a 95 % interval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from sparring.algo.annotate.domain import teacher_of
from sparring.rollout.evaluate import EvalPlan
from sparring.stages.context import POLICY, Context, RunFiles
from sparring.stages.data.contamination import check_unseen
from sparring.stages.models.teacher import OWN, teacher_folder
from sparring.stages.runtime.checkpoint_choice import chosen_weights
from sparring.stages.runtime.checkpoint_names import BEST, LAST
from sparring.stages.runtime.evaluation import evaluate_folder, held_out
from sparring.types import Task


async def run(context: Context) -> dict[str, Any]:
    """Evaluate the best or the last weights (`[eval] weights`) of every finished stage that `[eval] checkpoints` names.

    Returns:
        Evaluations as plain data, by name: one for each checkpoint; with `[eval] teachers`, `teacher/<name>` for each
        teacher; with `no_tool_tasks`, `no_tool` for the last checkpoint with a disabled sandbox.
    """
    config = context.config.eval
    tasks = held_out(context.config, context.factory, config.tasks)
    check_unseen(context, context.factory, tasks)
    stages = [stage for stage in config.checkpoints if context.done(stage) is not None]
    folders = {stage: _weights_of_stage(context, stage) for stage in stages}
    results: dict[str, Any] = {}
    for stage, folder in folders.items():
        results[stage] = await _evaluate_once(context, stage, folder, tasks)
    for name, taught in _tasks_by_teacher(context, tasks).items():
        results[f"teacher/{name}"] = await _evaluate_once(
            context, f"teacher/{name}", teacher_folder(context.config, name), taught, model=name
        )
    if config.no_tool_tasks and stages:
        from sparring.sandbox.make import make_boxes

        off = make_boxes(msgspec.structs.replace(context.config.sandbox, enabled=False))
        try:
            spread = _spread(tasks, config.no_tool_tasks)
            results["no_tool"] = await _evaluate_once(
                replace(context, boxes=off), "no_tool", folders[stages[-1]], spread
            )
        finally:
            await off.close()
    return results


def _weights_of_stage(context: Context, stage: str) -> Path:
    """Return the folder of the weights to evaluate. A resumed evaluation keeps its first choice of weights."""
    key = f"eval/{stage}/weights"
    begun = next(iter(context.store.groups(stage=f"eval/{stage}")), None) is not None
    weights = str(context.store.get(key)) if begun else context.config.eval.weights
    folder, which = chosen_weights(context, stage, weights)
    context.store.put(key, LAST if folder == context.output(stage) else BEST)
    if which:
        context.sink.event("eval", which)
    return folder


async def _evaluate_once(
    context: Context, label: str, folder: Path, tasks: Sequence[Task], model: str = POLICY
) -> dict[str, Any]:
    recorded = context.store.get(f"eval/{label}")
    if recorded is not None:
        known: dict[str, Any] = recorded
        return known
    config = context.config
    plan = EvalPlan(tasks=tasks, run_seed=config.run.seed, samples=config.eval.samples, stage=f"eval/{label}")
    result: dict[str, Any] = msgspec.to_builtins(await evaluate_folder(context, str(folder), plan, model))
    context.store.put(f"eval/{label}", result)
    return result


def _tasks_by_teacher(files: RunFiles, tasks: Sequence[Task]) -> dict[str, list[Task]]:
    stage = files.config.distill
    by_teacher: dict[str, list[Task]] = {}
    for task in tasks if files.config.eval.teachers and files.done("distill") is not None else ():
        if (name := teacher_of(stage.teachers, task)) not in OWN:
            by_teacher.setdefault(name, []).append(task)
    return dict(sorted(by_teacher.items()))


def _spread(tasks: Sequence[Task], count: int) -> list[Task]:
    return [tasks[place * len(tasks) // count] for place in range(min(count, len(tasks)))]
