"""The world of a chat: a run's own, with some of its held-out tasks, or a Python tool and nothing else."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from sparring.errors import BadInput
from sparring.launch.chat_world import PROPOSED, ChatWorld, bare_setting, setting_of
from sparring.recipe.load import load
from sparring.recipe.run_config import RunConfig
from sparring.sandbox.bubblewrap import BubblewrapBoxes
from sparring.sandbox.config import SandboxConfig
from sparring.types import Message, ToolCall

LOOP = Path(__file__).resolve().parents[2] / "loop"


def recipe(*overrides: str) -> RunConfig:
    return load(LOOP / "tiny.toml", [f"env.name={LOOP / 'tiny_world.py:Sums'}", *overrides])


def test_tasks_are_held_out_and_of_different_kinds() -> None:
    config = recipe("env.system=Be brief.")
    setting = setting_of(config)
    assert len(setting.tasks) == PROPOSED and {task.tag for task in setting.tasks[:2]} == {"odd", "even"}
    assert all("/eval/" in task.id for task in setting.tasks) and len({task.id for task in setting.tasks}) == PROPOSED
    assert setting.blank.messages == (Message(role="system", content="Be brief."),)


def test_a_conversation_has_the_tools_of_the_world() -> None:
    """A task opens the world at once; words of the user's own open it when a tool is called."""

    async def talk() -> None:
        setting = setting_of(recipe())
        boxes = BubblewrapBoxes(SandboxConfig(servers=1))
        world = ChatWorld(setting, boxes)
        assert [spec.name for spec in world.tools] == ["python"]
        call = ToolCall(id="a", name="python", arguments={"code": "x = 6\nprint(x * 7)"})
        for task in (setting.tasks[0], None):
            begun = await world.begin(task)
            assert begun == ([] if task is None else list(task.messages))
            answer = await world.step(Message(role="assistant", tool_calls=(call,)))
            assert [message.content for message in answer.messages] == ["42"] and not answer.done
            assert (await world.step(Message(role="assistant", content="42"))).done
        await world.close()
        await world.close()
        await boxes.close()

    asyncio.run(talk())


def test_a_bare_checkpoint_has_a_python_tool_and_no_tasks() -> None:
    setting = bare_setting()
    assert [spec.name for spec in setting.make().tools] == ["python"] and setting.tasks == ()
    assert setting.blank.box is not None


def test_a_world_that_is_not_there_is_refused() -> None:
    with pytest.raises(BadInput, match="env.name: expected a Python file"):
        setting_of(recipe("env.name=none.py:World"))
