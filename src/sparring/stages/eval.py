"""Held-out tasks before and after training, sampled at training temperature, with a 95 % interval."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import msgspec

from sparring.errors import refusal
from sparring.rollout.runner import Finished
from sparring.stages.context import POLICY, Context
from sparring.types import Task


async def run(context: Context) -> dict[str, Any]:
    """Evaluate the final weights of every stage that `[eval] checkpoints` names and the run has.

    Returns:
        Per checkpoint, and for `no_tool` (the last one with the tool host switched off): success, its interval, the same by
        dataset, turns and outcomes.
    """
    config = context.config.eval
    tasks = held_out(context, config.tasks)
    check_held_out(context, tasks)
    stages = [stage for stage in config.checkpoints if context.done(stage) is not None]
    results: dict[str, Any] = {}
    for stage in stages:
        results[stage] = await _once(context, stage, stage, tasks)
    if config.no_tool_tasks and stages:
        from sparring.sandbox.bubblewrap import BubblewrapBoxes

        off = BubblewrapBoxes(msgspec.structs.replace(context.config.sandbox, enabled=False))
        try:
            spread = _spread(tasks, config.no_tool_tasks)
            results["no_tool"] = await _once(context.with_boxes(off), "no_tool", stages[-1], spread)
        finally:
            await off.close()
    return results


def held_out(context: Context, count: int) -> list[Task]:
    """The first `count` tasks of the environment's evaluation split; 0 takes all.

    Raises:
        BadInput: there are fewer.
    """
    source = context.factory.tasks("eval", context.config.run.seed)
    tasks: list[Task] = []
    while (not count or len(tasks) < count) and (task := source.next()) is not None:
        tasks.append(task)
    if len(tasks) < max(1, count):
        raise refusal("eval.tasks", f"at most {len(tasks)}, the held-out tasks", str(count), "lower it, or raise env.held_out")
    return tasks


def check_held_out(context: Context, tasks: Sequence[Task]) -> None:
    """Prove that no held-out prompt text was trained on: neither demonstrated nor rolled out in this run.

    Raises:
        BadInput: one was.
    """
    texts = {_text(task): task.id for task in tasks}
    for index in range((context.done("collect") or {}).get("tasks", 0)):
        prompt = context.store.get(f"collect/{index}")["prompt"]
        if prompt in texts:
            raise _trained_on(texts[prompt], f"the prompt of a trace, {prompt[:60]!r}")
    trained = [group.task for stage in ("rl", "distill") for group in context.store.groups(stage=stage)]
    source = context.factory.tasks("demonstration", context.config.run.seed)
    while context.done("sft") is not None and (task := source.next()) is not None:
        trained.append(task)
    for task in trained:
        if _text(task) in texts:
            raise _trained_on(texts[_text(task)], f"the prompt of {task.id}")


def _trained_on(task: str, got: str) -> Exception:
    expected = "a prompt that no training stream holds"
    return refusal(f"held-out task {task}", expected, got, "change the splits of the environment")


async def evaluate_folder(context: Context, folder: str, tasks: Sequence[Task], label: str) -> dict[str, Any]:
    """Evaluate one checkpoint folder on `tasks`; as in `run`, without recording the result."""
    from pathlib import Path

    from sparring.rollout.evaluate import evaluate
    from sparring.stages.rl import runner

    successes = 0

    def done(number: int, finished: Finished) -> None:
        nonlocal successes
        successes += bool(finished.score is not None and finished.score.success)
        context.sink.log(f"eval {label}", number, {"rollout/success": successes / number})

    context.sink.start(f"eval {label}", len(tasks))
    engine = context.cluster.engine(POLICY, path=folder)
    try:
        result = await evaluate(
            runner(context, engine, Path(folder)),
            tasks,
            run_seed=context.config.run.seed,
            store=context.store,
            stage=f"eval/{label}",
            max_concurrent_rollouts=context.config.eval.max_concurrent_rollouts,
            done=done,
        )
    finally:
        await engine.close()
    return dataclasses.asdict(result)


async def _once(context: Context, label: str, stage: str, tasks: Sequence[Task]) -> dict[str, Any]:
    """One evaluation, unless the run already has it."""
    found = context.store.get(f"eval/{label}")
    if found is not None:
        return found
    context.store.truncate(f"eval/{label}", 0)
    result = await evaluate_folder(context, str(context.output(stage)), tasks, label)
    context.store.put(f"eval/{label}", result)
    return result


def _spread(tasks: Sequence[Task], count: int) -> list[Task]:
    """`count` tasks, evenly spaced over the list."""
    return [tasks[place * len(tasks) // count] for place in range(min(count, len(tasks)))]


def _text(task: Task) -> str:
    return "\n".join(message.content for message in task.messages)
