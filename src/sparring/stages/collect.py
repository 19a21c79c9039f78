"""The collect stage: a teacher plays the environment's training tasks, and the sft stage imitates its traces, reasoning
included."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from itertools import count
from typing import Any

from sparring.algo.annotate.domain import teacher_of
from sparring.envs.domains import factory_of
from sparring.envs.roles import roles_of
from sparring.envs.splits import identity
from sparring.envs.threads import THREADS
from sparring.errors import BadInput, RequestRefused, refusal
from sparring.observe.atomic_write import write_whole
from sparring.protocols import Engine, EnvFactory
from sparring.recipe.run_config import RunConfig
from sparring.record.recorder import Recorder
from sparring.record.transcript import TextRecorder, TextRequest
from sparring.rollout.episode import SessionRecorder
from sparring.rollout.runner import Finished, RolloutRunner
from sparring.rollout.seeds import rollout_seed
from sparring.stages.context import Context, renderer_of
from sparring.stages.data.demonstrations import conversation_of, rendered
from sparring.stages.data.traces import trace_row, transcript_of
from sparring.stages.models.context_length import outline_of
from sparring.stages.models.imitator import imitator_of
from sparring.stages.models.player import open_role_engines, with_roles
from sparring.stages.models.teacher import max_context_of, teacher_folder
from sparring.tasks.files import messages_of
from sparring.types import Message, Task

FILE = "traces.jsonl"


async def run(context: Context) -> dict[str, Any]:
    """Run the teacher's rollouts and write `<run>/collect/traces.jsonl`, one conversation a line, in task order.

    The result of a task is recorded when all its rollouts have ended, so a resume plays only the remaining tasks. A
    task with a rollout that the infrastructure broke is recorded only when the stage ends.

    Returns:
        `data`: the file. `tasks`, `traces`, `rollouts`: their numbers. Rollouts without a trace: `failed` (the
        infrastructure broke), `unscored` (the environment gave no reward), `unfinished` (a limit cut them short) and
        `full` (unfinished because the policy's or the teacher's context was full). `unsaid`: traces left out because
        the policy's chat format or its context cannot hold them.

    Raises:
        BadInput: no rollout earned `min_reward`, or the policy cannot imitate more than one trace in ten.
    """
    config = context.config.collect
    source = context.factory.tasks("train", context.config.run.seed)
    tasks = [task for task in (source.next() for _ in range(config.tasks)) if task is not None]
    context.sink.start("collect", len(tasks), min(len(tasks), config.max_concurrent_rollouts))
    async with AsyncExitStack() as stack:
        teachers = sorted(set(config.by_domain.values()))
        others = open_role_engines(context.config, context.cluster)
        for engine in others.values():
            stack.push_async_callback(engine.close)
        runners = {name: await stack.enter_async_context(_open_teacher(context, name, others)) for name in teachers}
        gate = asyncio.Semaphore(config.max_concurrent_rollouts)
        ended = count(1)
        pending = (
            _collect_task(context, runners[teacher_of(config.by_domain, task)], gate, index, task, ended)
            for index, task in enumerate(tasks)
        )
        done = await asyncio.gather(*pending)
    rows = [trace for collected in done for trace in collected["traces"]]
    counted = ("rollouts", "failed", "unscored", "unfinished", "full")
    totals = {name: sum(collected.get(name, 0) for collected in done) for name in counted}
    failure = next((collected["failure"] for collected in done if collected.get("failure")), "")
    if not rows:
        raise _no_traces(totals, failure)
    if totals["failed"]:
        context.sink.event("collect", f"{totals['failed']} of {totals['rollouts']} rollouts failed; {failure}")
    for index, collected in enumerate(done):
        context.store.put(f"collect/{index}", collected)
    sayable = _sayable(context, rows) if "sft" in context.config.run.stages else rows
    totals["unsaid"] = len(rows) - len(sayable)
    out = context.folder / "collect" / FILE
    out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(out, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in sayable).encode())
    return {"data": str(out), "tasks": len(tasks), "traces": len(sayable), **totals}


def _no_traces(totals: Mapping[str, int], failure: str) -> BadInput:
    why = "{failed} failed, {unscored} had no reward, {unfinished} were cut short".format(**totals)
    if totals["full"]:
        why += f" ({totals['full']} of these at the end of the context, of the policy or of the teacher)"
    actual = f"none among {totals['rollouts']} rollouts: {why}{failure and '; '}{failure}"
    return refusal(
        "collect.min_reward", "a rollout with at least this reward", actual, "lower it, or take another teacher"
    )


async def _collect_task(
    context: Context, teacher: RolloutRunner, gate: asyncio.Semaphore, index: int, task: Task, ended: Iterator[int]
) -> dict[str, Any]:
    """Return the recorded result of a task, or play the task and record it; `ended` counts finished tasks."""
    collected = context.store.get(f"collect/{index}")
    if collected is None:
        finished = await _roll_out(context.config, teacher, gate, index, task)
        collected = _task_result(context.config, context.factory, task, finished)
        if not collected["failed"]:
            context.store.put(f"collect/{index}", collected)
        metrics = {"collect/traces": float(len(collected["traces"])), "collect/unscored": float(collected["unscored"])}
        context.sink.log("collect", next(ended), metrics)
    else:
        next(ended)  # recorded tasks are counted before any rollout ends
    return collected


async def _roll_out(
    config: RunConfig, runner: RolloutRunner, gate: asyncio.Semaphore, index: int, task: Task
) -> Sequence[Finished]:

    async def attempt(number: int) -> Finished:
        async with gate:
            seed = rollout_seed(config.run.seed, "train", task, number, f"collect/{index}")
            return await runner.run(task, rollout_id=f"collect/{index}/{number}", index=number, seed=seed)

    return await asyncio.gather(*(attempt(number) for number in range(config.collect.attempts)))


def _task_result(config: RunConfig, factory: EnvFactory, task: Task, finished: Sequence[Finished]) -> dict[str, Any]:
    """Return the counts of a task's rollouts and the traces to keep.

    For each role of the policy, the first `keep` completed rollouts that earned `min_reward` are kept, with one trace
    for each branch of their conversations. In an environment of several roles a trace names its role.
    """
    section, tools = config.collect, factory.make().tools
    several = len(roles_of(factory_of(factory, task).make())) > 1
    by_role: dict[str, list[list[dict[str, Any]]]] = {}
    for rollout in finished:
        completed = {t.role for t in rollout.rollout.trajectories if t.outcome.kind == "completed"}
        for role, branches in rollout.transcripts.items():
            reward = None if rollout.score is None else rollout.score.of(role)
            earns = reward is not None and reward >= section.min_reward
            if earns and role in completed and config.rollout.speaks(role):
                earned = {"task": task.id, "reward": reward, **({"role": role} if several else {})}
                traces = [{**trace_row(branch, tools), **earned} for branch in branches]
                by_role.setdefault(role, []).append(traces)
    kept = [trace for of_role in by_role.values() for of_rollout in of_role[: section.keep] for trace in of_rollout]
    counts = {
        "rollouts": len(finished),
        "failed": sum(not each.rollout.outcome.trainable for each in finished),
        "unscored": sum(each.score is not None and each.score.reward is None for each in finished),
        "unfinished": sum(o.trainable and o.kind != "completed" for o in (each.rollout.outcome for each in finished)),
        "full": sum(each.rollout.outcome.reason == "context_length" for each in finished),
    }
    prompt = "\n".join(message.content for message in task.messages)
    failures = [each.rollout.outcome.failure for each in finished if each.score is None]
    failure = next((f"{each.where}: {each.message}" for each in failures if each is not None), None)
    why = {} if failure is None else {"failure": failure}
    return {"prompt": prompt, "identity": identity(task), "traces": kept, **counts, **why}


def _sayable(context: Context, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the traces that the policy could have sampled.

    A chat template may change a malformed reply, such as a reply with half a tool call in its text. A teacher's text
    may have more tokens than the policy has positions.
    """
    source, tools = context.input("sft"), context.factory.make().tools
    renderer, longest = renderer_of(context.config, source), outline_of(source).max_positions
    sayable: list[dict[str, Any]] = []
    refused: list[BadInput] = []
    for number, row in enumerate(rows, 1):
        name = f"trace {number}"
        try:
            transcript = transcript_of(row, messages_of(row["messages"], name), tools, name)
            rendered(conversation_of(name, transcript), renderer, longest)
        except BadInput as error:
            refused.append(error)
        else:
            sayable.append(row)
    if len(sayable) < 0.9 * len(rows):
        raise refused[0]
    if refused:
        context.sink.event("collect", f"{len(refused)} of {len(rows)} conversations left out; {refused[0]}")
    return sayable


@asynccontextmanager
async def _open_teacher(context: Context, name: str, others: Mapping[str, Engine]) -> AsyncIterator[RolloutRunner]:
    """Open the runner of rollouts in which the model `name` of the recipe plays the policy's roles; `others` are the
    engines of all other roles."""
    config = context.config
    spec, sampling = config.models[name], config.rollout.sampling.build()
    recorder: SessionRecorder
    if spec.served is not None and spec.served.kind == "chat":
        from sparring.engine.adapters.chat_endpoint import ChatEndpoint
        from sparring.engine.adapters.client import read_api_key

        served = spec.served
        endpoint = ChatEndpoint(served.url, model=served.served_model, api_key=read_api_key(served.api_key_env))

        async def reply(request: TextRequest) -> Message:
            if request.constraint is not None:
                kind = request.constraint.kind
                raise RequestRefused(f"{name}: expected no constraint with a chat endpoint, got {kind}; use an engine")
            return await endpoint.reply(request.messages, request.tools, replace(sampling, seed=request.seed))

        recorder, close = TextRecorder(reply, "teacher", imitator_of(context)), endpoint.close
    else:
        folder = teacher_folder(config, name)
        engine, renderer = context.cluster.engine(name, path=str(folder)), renderer_of(config, folder, name)
        recorder = Recorder(engine, renderer, sampling=sampling, model=name, max_context=max_context_of(config, name))
        close = engine.close
    try:
        speaking = with_roles(config, recorder, others)
        yield RolloutRunner(
            context.factory,
            context.boxes,
            speaking,
            context.harness,
            config.rollout,
            executors=THREADS.executor,
            box_starts=context.box_starts,
        )
    finally:
        await close()
