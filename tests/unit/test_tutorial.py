"""docs/tutorial.md and the world of README.md, executed: every file on the page is written, loaded, and played as far as
it goes without a model."""

from __future__ import annotations

import asyncio
import contextlib
import re
from pathlib import Path

import pytest

from sparring.envs.config import EnvConfig
from sparring.envs.registry import load_env
from sparring.envs.roles import check_roles
from sparring.envs.splits import overlap
from sparring.harness.load import load_harness
from sparring.protocols import EnvFactory
from sparring.recipe.load import load
from sparring.record.transcript import TextRecorder, TextRequest
from sparring.rollout.runner import RolloutRunner
from sparring.sandbox.bubblewrap import BubblewrapBoxes
from sparring.sandbox.config import SandboxConfig
from sparring.tasks.files import read_rows
from sparring.types import Message, Outcome, Segment, Task, ToolCall, Trajectory

ROOT = Path(__file__).parents[2]
PAGES = "".join((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/tutorial.md"))
BLOCKS = re.findall(r"^```\w+\n# (\S+)\n(.*?)^```", PAGES, flags=re.MULTILINE | re.DOTALL)
LINES = {name: sum(1 for line in text.splitlines() if line.strip()) for name, text in BLOCKS}
RECIPES = [name for name, _ in BLOCKS if name.endswith(".toml")]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in BLOCKS:
        (tmp_path / name).write_text(text)
    return tmp_path


def env_of(folder: Path, recipe: str) -> tuple[EnvConfig, EnvFactory]:
    with contextlib.chdir(folder):
        config = load(recipe).env
        return config, load_env(config, read_rows)


def first(factory: EnvFactory, split: str) -> Task:
    task = factory.tasks(split, 0).next()
    assert task is not None
    return task


async def play(factory: EnvFactory, task: Task, replies: list[Message]) -> tuple[list[Message], float | None]:
    boxes = BubblewrapBoxes(SandboxConfig(servers=1))
    box = await boxes.take(task.box) if task.box is not None else None
    try:
        env = factory.make()
        messages = [*task.messages, *(await env.open(task, box)).messages]
        expert = factory.expert(task)
        while True:
            reply = replies.pop(0) if replies or expert is None else expert(messages)
            seen = await env.step(reply)
            messages += [reply, *seen.messages]
            if seen.done:
                break
        segments = tuple(
            Segment(index=i, parent=i - 1 if i else None, source="expert", tokens=(), message=m)
            for i, m in enumerate(messages)
        )
        outcome = Outcome(kind="completed", reason="answered")
        score = await env.score(Trajectory(id="r", task=task.id, role="policy", segments=segments, outcome=outcome))
        return messages, None if score is None else score.reward
    finally:
        if box is not None:
            await box.close()
        await boxes.close()


def says(text: str) -> Message:
    return Message(role="assistant", content=text)


def test_the_page_keeps_its_promise_of_size() -> None:
    assert LINES["capitals.py"] <= 2
    assert LINES["backwards.py"] <= 15 and LINES["squares.py"] <= 15 and LINES["bakery.py"] <= 12
    shop = dict(BLOCKS)["shop.py"].split("class ShopWithExpert")[0]
    assert sum(1 for line in shop.splitlines() if line.strip()) <= 30
    assert len(RECIPES) == 6


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_loads_and_its_splits_never_meet(folder: Path, recipe: str) -> None:
    _, factory = env_of(folder, recipe)
    held_out = list(iter(factory.tasks("eval", 0).next, None))
    train = factory.tasks("train", 0)
    assert held_out and overlap(held_out, [task for task in (train.next() for _ in range(300)) if task]) == set()


def test_the_reward_function(folder: Path) -> None:
    _, factory = env_of(folder, "capitals.toml")
    task = first(factory, "train")
    assert asyncio.run(play(factory, task, [says(f" {task.data['answer']}\n")]))[1] == 1.0
    assert asyncio.run(play(factory, task, [says("Atlantis")]))[1] == 0.0


def test_the_single_turn_environment(folder: Path) -> None:
    _, factory = env_of(folder, "backwards.toml")
    task = first(factory, "train")
    word = re.findall(r"Spell (\w+) backwards", task.messages[0].content)[0]
    assert asyncio.run(play(factory, task, [says(word[::-1])]))[1] == 1.0
    assert asyncio.run(play(factory, task, [says(word)]))[1] == 0.0


def test_the_world_of_the_readme(folder: Path) -> None:
    _, factory = env_of(folder, "bakery.toml")
    task = first(factory, "train")
    asked = Message(role="assistant", tool_calls=(ToolCall(id="c", name="price", arguments={}),))
    messages, reward = asyncio.run(play(factory, task, [asked, says(task.data["answer"])]))
    assert messages[-2].content == str(task.data["price"]) and reward == 1.0
    assert asyncio.run(play(factory, task, [says("about 100")]))[1] == 0.0


def test_the_tool_environment_and_its_expert(folder: Path) -> None:
    config, factory = env_of(folder, "shop.toml")
    (spec,) = factory.make().tools
    assert spec.parameters["properties"] == {"item": {"type": "string", "description": "What to look up."}}
    task = first(factory, "demonstration")
    assert max(task.data["prices"].values()) <= 20 and task.limits.max_turns == 3
    assert asyncio.run(play(factory, task, []))[1] == 1.0
    wrong = ToolCall(id="c", name="price", arguments={"item": "gold"})
    messages, reward = asyncio.run(play(factory, task, [Message(role="assistant", tool_calls=(wrong,)), says("1")]))
    assert messages[-2].content == "error: we have no gold" and reward == 0.0
    assert len(list(iter(factory.tasks("demonstration", 0).next, None))) == config.demonstrations == 500


def test_the_environment_with_a_box(folder: Path) -> None:
    _, factory = env_of(folder, "squares.toml")
    task = first(factory, "train")
    assert task.box is not None and task.box.timeout_s == 1.0
    numbers = task.messages[0].content.split("of ")[-1].rstrip("?")
    call = ToolCall(id="c", name="python", arguments={"code": f"print(sum(n * n for n in {numbers}))"})
    asked = Message(role="assistant", tool_calls=(call,))
    messages, _ = asyncio.run(play(factory, task, [asked, says("?")]))
    assert asyncio.run(play(factory, task, [asked, says(messages[-2].content)]))[1] == 1.0


@pytest.mark.parametrize(("proposal", "earned"), [("expert", 1.0), ("1 2", 0.0)])
def test_the_game_of_two_roles(folder: Path, proposal: str, earned: float) -> None:
    _, factory = env_of(folder, "duel.toml")
    with contextlib.chdir(folder):
        config = load("duel.toml")
        harness = load_harness(config.rollout.harness, check_roles(factory.make()))
    task = first(factory, "train")
    experts = factory.expert(task)

    async def reply(request: TextRequest) -> Message:
        if request.role == "proposer" and proposal != "expert":
            return says(proposal)
        return experts[request.role](request.messages)

    boxes = BubblewrapBoxes(SandboxConfig(servers=1))
    runner = RolloutRunner(factory, boxes, TextRecorder(reply, "expert"), harness, config.rollout)
    finished = asyncio.run(runner.run(task, rollout_id="r", index=0, seed=1))
    assert [trajectory.role for trajectory in finished.rollout.trajectories] == ["proposer", "solver"]
    assert finished.score is not None and finished.score.per_role == {"proposer": earned, "solver": 1.0}
