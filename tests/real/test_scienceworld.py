"""The game of recipes/scienceworld, played: its own ways score 1, a process that dies is the infrastructure's failure,
and none is left behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from sparring.errors import EnvError
from sparring.types import Message, Outcome, Task, ToolCall, Trajectory
from sparring.user_files.named import named

pytestmark = pytest.mark.real
FOLDER = Path(__file__).parents[2] / "recipes/scienceworld"
EMPTY = Trajectory(id="r", task="t", role="policy", segments=(), outcome=Outcome(kind="completed", reason="answered"))


def of_recipe(name: str) -> Any:
    return named(f"{FOLDER}/{name}", "env.name")


@pytest.fixture(scope="module")
def rows() -> list[Mapping[str, Any]]:
    """A row of each family."""
    simulator = of_recipe("world.py:Simulator")()
    found = [next(of_recipe("tasks.py:rows")(simulator, family, [0])) for family in of_recipe("tasks.py:FAMILIES")]
    simulator.close()
    return found


def task_of(row: Mapping[str, Any]) -> Task:
    return Task(id=row["id"], env="ScienceWorld", messages=(), data=row)


def act(action: str) -> Message:
    return Message(role="assistant", tool_calls=(ToolCall(id="1", name="act", arguments={"action": action}),))


def test_the_game_s_own_way_is_worth_1_and_silence_nothing(rows: list[Mapping[str, Any]]) -> None:
    async def earned(row: Mapping[str, Any], *, silent: bool = False) -> tuple[float, bool | None, int]:
        env, task = of_recipe("world.py:ScienceWorld")(), task_of(row)
        await env.open(task, None)
        expert, messages, done = env.expert(task), [], silent
        while not done:
            reply = expert(messages)
            seen = await env.step(reply)
            messages += [reply, *seen.messages]
            done = seen.done
        score = await env.score(EMPTY)
        await env.close()
        return score.reward, score.success, len(messages) // 2

    for row in rows:
        assert asyncio.run(earned(row)) == (1.0, True, len(row["gold"]))
        assert asyncio.run(earned(row, silent=True)) == (0.0, False, 0)


def test_what_the_model_gets_wrong_it_reads(rows: list[Mapping[str, Any]]) -> None:
    async def played() -> list[str]:
        env = of_recipe("world.py:ScienceWorld")()
        await env.open(task_of(rows[0]), None)
        said = [await env.step(act(action)) for action in ("dance", "focus on the moon", "\ud800", "look around\n0")]
        await env.close()
        return [message.content for each in said for message in each.messages]

    assert asyncio.run(played()) == ["No known action matches that input."] * 4


def test_a_process_that_dies_fails_the_rollout_and_is_replaced(rows: list[Mapping[str, Any]]) -> None:
    async def played() -> str:
        kind, task = of_recipe("world.py:ScienceWorld"), task_of(rows[0])
        env, other = kind(), kind()
        await env.open(task, None)
        env.simulator.game._gateway.java_process.kill()
        with pytest.raises(EnvError):
            await env.step(act("look around"))
        await env.close()
        await other.open(task, None)
        seen = await other.step(act("look around"))
        await other.close()
        return seen.messages[0].content

    assert "you see" in asyncio.run(played())


PROGRAM = """
import json, signal, sys
sys.path.insert(0, sys.argv[1])
from world import Simulator
print(json.dumps(Simulator().game._gateway.java_process.pid), flush=True)
signal.pause()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_no_process_outlives_the_run(number: int) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(FOLDER)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as program:
        assert program.stdout is not None
        java = json.loads(program.stdout.readline())
        waiting = os.pidfd_open(java)
        program.send_signal(number)
    ended = asyncio.run(_ended(waiting))
    os.close(waiting)
    assert ended


async def _ended(process: int) -> bool:
    """Return whether a process ends within ten seconds."""
    over = asyncio.Event()
    asyncio.get_running_loop().add_reader(process, over.set)
    try:
        await asyncio.wait_for(over.wait(), 10)
    except TimeoutError:
        return False
    finally:
        asyncio.get_running_loop().remove_reader(process)
    return True
