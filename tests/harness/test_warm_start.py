"""A warm start through pi, as it is published: a teacher is collected from, and sft is shown pi's own prompts."""

from __future__ import annotations

import asyncio
import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from agents import PROGRAMS, ROOT
from chat_server import ChatServer, message

from sparring.cli.main import main
from sparring.launch.run import opened
from sparring.recipe.load import load
from sparring.recipe.run_config import resolve
from sparring.stages.context import renderer_of
from sparring.stages.data.demonstrations import demonstrations
from sparring.store.sqlite import SqliteStore

pytestmark = pytest.mark.harness

SYSTEM = "Use the shell.\nCurrent date: "
RECIPE = ROOT / "recipes/agent.toml"
SMALL = (
    f"env.name={ROOT / 'recipes/agent/world.py'}:Repair",
    f"rollout.harness={ROOT / 'recipes/agent/pi.toml'}",
    f"rollout.programs={PROGRAMS}",
    "rollout.max_concurrent_rollouts=2",
    "collect.max_concurrent_rollouts=2",
    "collect.tasks=3",
    "env.held_out=2",
    "env.demonstrations=4",
    "observe.progress=off",
)


def ran(folder: Path, *settings: str, given: tuple[str, ...] = SMALL) -> tuple[list[str], int]:
    """Run the recipe of pi with these settings; all settings, and the exit status."""
    every = [*given, f"run.directory={folder}", *settings]
    return every, main(["run", str(RECIPE), *(word for setting in every for word in ("--set", setting))])


def repairs(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Check, repair what is named, until all is well."""
    said = body["messages"][-1]["content"]
    if body["messages"][-1]["role"] != "tool" or "no output" in said:
        command = "sh check"
    elif said.startswith("ok"):
        return message("Done.")
    else:
        fault, name = said.split()
        command = f"{'touch' if fault == 'missing:' else 'rm'} {name}"
    call = {"name": "bash", "arguments": json.dumps({"command": command})}
    return message(tool_calls=[{"id": "c1", "type": "function", "function": call}])


def traces(folder: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "agent/collect/traces.jsonl").read_text().splitlines()]
    for row in rows:
        assert row["messages"][0]["content"].startswith(SYSTEM)
        assert [tool["function"]["name"] for tool in row["tools"]] == ["bash"]
    return rows


def test_a_served_chat_model_teaches_through_pi_and_sft_is_shown_what_rl_shows(tmp_path: Path) -> None:
    """The ids that sft imitates begin with those that the policy is given in the first step of rl."""
    server = ChatServer(repairs)
    served = f'models.teacher.served={{kind="chat",url="{server.url}",served_model="big"}}'
    stages = 'run.stages=["init", "collect", "sft", "rl"]'
    try:
        settings, status = ran(tmp_path, served, stages, "sft.steps=1", "rl.steps=1", "rl.groups_per_step=1")
    finally:
        server.stop()
    assert status == 0
    rows = traces(tmp_path)
    assert [row["reward"] for row in rows] == [1.0] * 3

    async def imitated() -> list[tuple[int, ...]]:
        async with opened(resolve(load(RECIPE, settings))) as context:
            renderer = renderer_of(context.config, context.input("sft"))
            return [e.tokens for _, e in await demonstrations(context, renderer, 1024)]

    shown = asyncio.run(imitated())
    with closing(SqliteStore(tmp_path / "agent/store.sqlite", read_only=True)) as store:
        (group,) = store.groups(stage="rl")
    for rollout in group.rollouts:
        prompt = rollout.trajectories[0].segments[0].tokens
        assert all(tokens[: len(prompt)] == prompt for tokens in shown), "the world has one prompt"


def test_a_native_teacher_that_an_expert_taught_through_pi_is_collected_from_through_pi(tmp_path: Path) -> None:
    """It need not be good: what it was right in is kept, what it said is said by the policy's format."""
    taught = ("run.name=teacher", 'run.stages=["init", "sft"]', "sft.steps=150", "env.demonstrations=24")
    assert ran(tmp_path, *taught)[1] == 0
    model = f'models.teacher.path="{tmp_path / "teacher/sft/model"}"'
    more = ('run.stages=["init", "collect", "sft"]', "sft.steps=1", "collect.tasks=6", "collect.min_reward=0.0")
    assert ran(tmp_path, model, *more)[1] == 0
    assert len(traces(tmp_path)) >= 4
    with closing(SqliteStore(tmp_path / "agent/store.sqlite", read_only=True)) as store:
        assert store.get("stage/collect")["failed"] == 0
