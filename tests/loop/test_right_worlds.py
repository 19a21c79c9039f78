"""Worlds that are right although they look odd: one prompt for all tasks, an expert that earns 0, a penalty for
silence."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from sparring.envs.splits import identity
from sparring.errors import BadInput
from sparring.launch.run import check_recipe, run_recipe
from sparring.recipe.load import load
from sparring.store.sqlite import SqliteStore

TINY = Path(__file__).parent / "tiny.toml"
WORLD = """
import random

from sparring.envs.base import Env
from sparring.types import Message, Observation, Score


class Nim(Env):
    '''One prompt; how many sticks there are is seen when it opens. The right move draws, any other loses.'''

    success_at = 0.0

    def generate(self, random):
        return {"prompt": "Take 1, 2 or 3 sticks.", "sticks": random.randrange(1000)}

    def key(self, task):
        return str(task.data["sticks"])

    async def open(self, task, box):
        await super().open(task, box)
        return Observation(messages=(Message(role="user", content=f"{task.data['sticks']} sticks"),))

    def right(self, task):
        return str(task.data["sticks"] % 4 or 1)

    def reward(self, completion, task):
        return 0.0 if completion == self.right(task) else -1.0

    def expert(self, task):
        return lambda messages: Message(role="assistant", content=self.right(task))


class Keyless(Nim):
    def key(self, task):
        return None


class Costly(Nim):
    '''Without a notion of success, the best answer costs less than none.'''

    success_at = None

    def reward(self, completion, task):
        return -0.1 if completion == self.right(task) else -1.0


class Paid(Nim):
    '''Its role is paid by name, and the reward of all together is nothing.'''

    success_at = None

    async def score(self, trajectory):
        return Score(reward=0.0, per_role={"policy": 1.0})


class Hopeless(Nim):
    '''The expert is wrong, and loses as silence does.'''

    def expert(self, task):
        return lambda messages: Message(role="assistant", content="9")


class Unscored(Nim):
    def reward(self, completion, task):
        return None


class Drifting(Nim):
    def generate(self, generator):
        return {"prompt": f"Take 1, 2 or 3 of {random.random()} sticks.", "sticks": 1}

    def key(self, task):
        return None


class Lost(Nim):
    '''A draw is no success here, and silence draws, too.'''

    success_at = 1.0

    def reward(self, completion, task):
        return 0.0
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Callable[..., object]:
    """The tiny recipe with one of these worlds."""
    (tmp_path / "worlds.py").write_text(WORLD)

    def of(world: str, *settings: str) -> object:
        name = f"env.name={tmp_path}/worlds.py:{world}"
        return load(TINY, [f"run.directory={tmp_path}", name, "observe.progress=off", *settings])

    return of


@pytest.mark.parametrize(
    ("world", "fact"),
    [
        ("Nim", "expert 0, empty answer -1"),
        ("Costly", "expert -0.1, empty answer -1"),
        ("Paid", "expert 0, empty answer 0"),
    ],
)
def test_right_worlds_pass_the_preflight(recipe: Callable[..., object], world: str, fact: str) -> None:
    assert f"env: {world}: {fact}" in check_recipe(recipe(world))


@pytest.mark.parametrize(
    ("world", "where", "noun"),
    [
        ("Hopeless", "task Hopeless/", "an expert"),
        ("Unscored", "task Unscored/", "a reward of an answer"),
        ("Drifting", "env Drifting", "the same task"),
        ("Lost", "task Lost/", "an expert"),
        ("Keyless", "env Keyless", "a new prompt for the eval split"),
    ],
)
def test_wrong_worlds_are_refused(recipe: Callable[..., object], world: str, where: str, noun: str) -> None:
    with pytest.raises(BadInput, match=f"^{where}.*: expected {noun}"):
        check_recipe(recipe(world))


def test_a_checkpoint_plays_a_game_of_one_prompt(given: Path, tmp_path: Path, recipe: Callable[..., object]) -> None:
    """Without demonstrations, of which the default asks for more than there are keys."""
    recipe("Nim")
    settings = [
        f"env.name={tmp_path}/worlds.py:Nim",
        "env.demonstrations=1024",
        'run.stages=["rl", "eval"]',
        "rl.steps=1",
    ]
    folder = run_recipe(load(given, [*settings, "observe.progress=off"]))
    assert json.loads((folder / "summary.json").read_text())["eval_tasks"] == 6


def test_held_out_tasks_are_not_trained_on(recipe: Callable[..., object]) -> None:
    folder = run_recipe(recipe("Nim", "rl.steps=3"))
    with closing(SqliteStore(folder / "store.sqlite", read_only=True)) as store:
        held = {identity(group.task) for group in store.groups(stage="eval/rl")}
        shown = {identity(group.task) for group in store.groups(stage="rl")}
    assert len(held) == 6 and len(shown) > 1 and not held & shown
