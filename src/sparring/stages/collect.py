"""Traces of a teacher, its reasoning included, on the environment's training tasks: what the sft stage then imitates."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from sparring.errors import refusal
from sparring.harness.chat import ChatHarness
from sparring.record.recorder import Recorder
from sparring.render.dialect import message_dicts
from sparring.render.load import load_renderer
from sparring.rollout.runner import Finished, RolloutRunner
from sparring.rollout.seeds import rollout_seed
from sparring.stages.context import Context
from sparring.stages.heard import ChatSessions, Heard
from sparring.stages.teachers import room_of, teacher_folder
from sparring.types import Task

FILE = "traces.jsonl"


async def run(context: Context) -> dict[str, Any]:
    """Roll the teacher out and write `<run>/collect/traces.jsonl`, a conversation a line, in the order of the tasks.

    What is done with a task is recorded when all its rollouts have ended, so that a run that goes on asks for the others alone;
    one that the infrastructure broke is asked for again, unless the stage ends without it.

    Returns:
        `data`, the file; `tasks`; `traces`, how many conversations it holds; `rollouts`; of these `failed`, which the
        infrastructure broke and which say nothing, and `unscored`, to which the world gave no reward: none of them is kept.

    Raises:
        BadInput: no rollout earned enough to be kept.
    """
    config = context.config.collect
    source = context.factory.tasks("train", context.config.run.seed)
    tasks = [task for task in (source.next() for _ in range(config.tasks)) if task is not None]
    context.sink.start("collect", len(tasks))
    async with _rollouts(context) as (runner, heard):
        gate = asyncio.Semaphore(config.max_concurrent_rollouts)
        done = await asyncio.gather(*(_task(context, runner, heard, gate, index, task) for index, task in enumerate(tasks)))
    rows = [trace for found in done for trace in found["traces"]]
    totals = {name: sum(found[name] for found in done) for name in ("rollouts", "failed", "unscored")}
    if not rows:
        got = "none among {rollouts} rollouts, of which {failed} failed and {unscored} had no reward".format(**totals)
        raise refusal("collect.min_reward", "a rollout that earns it", got, "lower it, or take another teacher")
    for index, found in enumerate(done):
        context.store.put(f"collect/{index}", found)
    out = context.folder / "collect" / FILE
    out.parent.mkdir(parents=True, exist_ok=True)
    staging = out.with_name(out.name + ".tmp")
    staging.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    staging.rename(out)
    return {"data": str(out), "tasks": len(tasks), "traces": len(rows), **totals}


async def _task(
    context: Context, runner: RolloutRunner, heard: Heard, gate: asyncio.Semaphore, index: int, task: Task
) -> dict[str, Any]:
    """What one task gives, unless the run already has it."""
    config = context.config.collect
    found = context.store.get(f"collect/{index}")
    if found is None:
        finished = await _rolled_out(context, runner, gate, index, task)
        found = _kept(task, finished, heard, config.min_reward, config.keep)
        if not found["failed"]:
            context.store.put(f"collect/{index}", found)
        told = {"collect/traces": float(len(found["traces"])), "collect/unscored": float(found["unscored"])}
        context.sink.log("collect", index + 1, told)
    return found


async def _rolled_out(
    context: Context, runner: RolloutRunner, gate: asyncio.Semaphore, index: int, task: Task
) -> Sequence[Finished]:
    async def attempt(number: int) -> Finished:
        async with gate:
            seed = rollout_seed(context.config.run.seed, "train", task, number)
            return await runner.run(task, rollout_id=f"collect/{index}/{number}", index=number, seed=seed)

    return await asyncio.gather(*(attempt(number) for number in range(context.config.collect.attempts)))


def _kept(task: Task, finished: Sequence[Finished], heard: Heard, least: float, most: int) -> dict[str, Any]:
    """What one task gives: the first `most` conversations that earned `least`; those that were cut short are none."""
    traces = []
    for each in finished:
        messages = heard.conversation(each)
        reward = None if each.score is None else each.score.reward
        if reward is not None and reward >= least and each.rollout.outcome.kind == "completed" and messages:
            traces.append({"messages": message_dicts(messages), "task": task.id, "reward": reward})
    counts = {
        "rollouts": len(finished),
        "failed": sum(each.score is None for each in finished),
        "unscored": sum(each.score is not None and each.score.reward is None for each in finished),
    }
    prompt = "\n".join(message.content for message in task.messages)
    return {"prompt": prompt, "traces": traces[:most], **counts}


@asynccontextmanager
async def _rollouts(context: Context) -> AsyncIterator[tuple[RolloutRunner, Heard]]:
    """What runs one rollout of the teacher, and who hears what is said."""
    config = context.config
    name = config.collect.model
    spec, sampling = config.models[name], config.rollout.sampling()
    if spec.served is not None and spec.served.kind == "chat":
        from sparring.engine.adapters.chat_endpoint import ChatEndpoint
        from sparring.engine.adapters.key import key_of

        served = spec.served
        endpoint = ChatEndpoint(served.url, model=served.served_model, api_key=key_of(served.api_key_env))
        heard = Heard(ChatSessions(endpoint, sampling))
        close = endpoint.close
    else:
        folder = teacher_folder(context, name)
        engine = context.cluster.engine(name, path=str(folder))
        renderer = load_renderer(folder, spec.renderer, spec.thinking)
        heard = Heard(Recorder(engine, renderer, sampling=sampling, model=name, max_context=room_of(context, name)))
        close = engine.close
    try:
        yield RolloutRunner(context.factory, context.boxes, heard, ChatHarness(), config.rollout), heard
    finally:
        await close()
