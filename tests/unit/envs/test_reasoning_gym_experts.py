"""Every scripted expert solves its dataset, its programs run for real."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Sequence

import pytest
from segments import finished

from sparring.envs.config import EnvConfig
from sparring.envs.reasoning_gym import ReasoningGym, score_answer
from sparring.envs.reasoning_gym_experts import PROGRAMS
from sparring.sandbox.bubblewrap import BubblewrapBoxes
from sparring.sandbox.config import SandboxConfig
from sparring.types import Message, Task

COUNT = 50
NAMES = [*PROGRAMS, "calendar_arithmetic"]
RUN = """
import contextlib, io, json, sys
for line in sys.stdin:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(json.loads(line), {})
    print(json.dumps(out.getvalue()))
"""


def shown(name: str, count: int) -> tuple[ReasoningGym, list[Task]]:
    args = {"datasets": [{"name": name, "demonstrations": count}]}
    world = ReasoningGym(EnvConfig(name="reasoning_gym", args=args, held_out=1))
    return world, list(iter(world.tasks("demonstration", 1).next, None))


def run_all(programs: Sequence[str]) -> list[str]:
    fed = "".join(json.dumps(program) + "\n" for program in programs)
    ran = subprocess.run([sys.executable, "-I", "-c", RUN], input=fed, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    return [json.loads(line) for line in ran.stdout.splitlines()]


@pytest.mark.parametrize("name", NAMES)
def test_the_expert_solves_its_dataset(name: str) -> None:
    world, tasks = shown(name, COUNT)
    experts = [world.expert(task) for task in tasks]
    calls = [expert(task.messages) for expert, task in zip(experts, tasks, strict=True) if expert is not None]
    outputs = run_all([str((call.tool_calls[0].arguments or {})["code"]) for call in calls])
    solved = 0
    for task, expert, call, output in zip(tasks, experts, calls, outputs, strict=True):
        assert expert is not None
        answer = expert((*task.messages, call, Message(role="tool", content=output)))
        assert not answer.tool_calls and answer.content == output.strip(), "the answer repeats the output"
        solved += score_answer(task, answer.content) == 1.0
    assert solved >= 0.98 * COUNT


def test_a_dataset_without_expert_says_so() -> None:
    world = ReasoningGym(EnvConfig(name="reasoning_gym", args={"datasets": [{"name": "sudoku"}]}, held_out=1))
    task = world.tasks("train", 0).next()
    assert task is not None and world.expert(task) is None


async def one_rollout(boxes: BubblewrapBoxes, name: str) -> tuple[float | None, list[Message]]:
    """Open, call, answer, score: through the environment, in a real box."""
    world, (task,) = shown(name, 1)
    env, expert = world.make(), world.expert(task)
    assert expert is not None and task.box is not None
    box = await boxes.take(task.box)
    try:
        messages = [*task.messages, *(await env.open(task, box)).messages]
        for _ in range(2):
            messages.append(expert(messages))
            seen = await env.step(messages[-1])
            messages += seen.messages
        assert seen.done
        score = await env.score(finished(*messages, task=task.id))
        return (score.reward if score else None), messages
    finally:
        await box.close()


def test_every_expert_is_rewarded_in_a_real_box() -> None:
    async def run() -> dict[str, float | None]:
        boxes = BubblewrapBoxes(SandboxConfig(servers=1))
        try:
            return {name: (await one_rollout(boxes, name))[0] for name in NAMES}
        finally:
            await boxes.close()

    assert asyncio.run(run()) == {name: 1.0 for name in NAMES}


def test_with_the_tool_host_off_the_expert_gets_nothing() -> None:
    boxes = BubblewrapBoxes(SandboxConfig(enabled=False))
    reward, messages = asyncio.run(one_rollout(boxes, "products"))
    assert reward == 0.0
    assert messages[-2].role == "tool" and messages[-2].content
