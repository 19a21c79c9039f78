"""`[env]` -> a factory: what is found, what is refused, and reward functions over data files."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from refusals import refused_at
from segments import answer, finished

from sparring.envs.config import Columns, EnvConfig
from sparring.envs.registry import load_env
from sparring.envs.splits import overlap
from sparring.errors import BadInput
from sparring.tasks.files import read_rows
from sparring.types import BoxSpec, Limits, Task

WORLD = '''
import msgspec
from dataclasses import dataclass
from sparring.envs.base import Env, tool

@dataclass
class Where:
    x: int

class Guess(Env):
    class Args(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
        size: int = 100
        sides: list[int] = []

    def generate(self, random):
        return {"prompt": f"Guess {random.randint(0, self.args.size)}", "answer": "1"}

    @tool
    def peek(self, where: Where) -> int:
        """Peek."""
        return where.x

    def reward(self, completion, task):
        return float(completion == "1")

NUMBER = 3
'''


@pytest.fixture
def world(tmp_path: Path) -> str:
    path = tmp_path / "guess.py"
    path.write_text(WORLD)
    return str(path)


def test_a_class_in_a_file(world: str) -> None:
    limits = Limits(max_turns=2)
    config = EnvConfig(name=f"{world}:Guess", args={"size": 10**6}, system="Be brief.", limits=limits)
    factory = load_env(config)
    task = factory.tasks("train", 1).next()
    assert task is not None
    assert [m.role for m in task.messages] == ["system", "user"]
    assert task.limits == Limits(max_turns=2)
    assert task.box is None, "a world without a box tool needs no box"
    assert factory.make().tools[0].parameters["properties"]["where"]["required"] == ["x"]
    assert factory.expert(task) is None
    with refused_at("env.box", "Guess, which opens none; leave the table out"):
        load_env(msgspec.structs.replace(config, box=BoxSpec(image="nope")))


def test_a_class_in_a_package_and_a_built_in() -> None:
    args = {"datasets": [{"name": "gcd"}]}
    by_name = load_env(EnvConfig(name="reasoning_gym", args=args, box=BoxSpec(timeout_s=1.5)))
    by_path = load_env(EnvConfig(name="sparring.envs.reasoning_gym:ReasoningGym", args=args))
    first, second = by_name.tasks("train", 4).next(), by_path.tasks("train", 4).next()
    assert first is not None and second is not None
    assert first.messages == second.messages
    assert first.box == BoxSpec(timeout_s=1.5)


@pytest.mark.parametrize(
    ("name", "args", "said"),
    [
        ("resoning_gym", {}, "env.name: expected one of reasoning_gym"),
        ("WORLD:Gess", {}, "env.name: expected a name"),
        ("WORLD:NUMBER", {}, "env.name: expected a subclass of sparring.Env"),
        ("nowhere.py:Guess", {}, "env.name: expected a Python file"),
        ("no_such_package.worlds:Guess", {}, "env.name: expected an installed module no_such_package.worlds"),
        ("WORLD:Guess", {"sise": 3}, r"env.args: expected settings"),
        ("WORLD:Guess", {"size": "3"}, "got size: expected an integer"),
        ("WORLD:Guess", {"sides": [1, "b"]}, "got sides.1: expected a.* integer"),
    ],
)
def test_an_unknown_world_or_setting_is_refused(world: str, name: str, args: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        load_env(EnvConfig(name=name.replace("WORLD", world), args=args))


def test_a_file_that_does_not_run_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("import no_such_module\n")
    with pytest.raises(BadInput, match="env.name: expected a Python file"):
        load_env(EnvConfig(name=f"{path}:World"))


BODY = "from sparring import Env\nfrom sparring.types import Message\nclass W({base}):\n    {body}\n"
DRAW = "def generate(self, random): return "


@pytest.mark.parametrize(
    ("base", "body", "said"),
    [
        ("object", "pass", r"env.name: expected a subclass"),
        (
            "object",
            "def __init__(self, config): pass",
            "env.name: expected a subclass of sparring.Env, or .* which gave <",
        ),
        ("Env", "def __init__(self, args): 1 / 0", "env W: expected a world that can be made .* ZeroDivisionError"),
        ("Env", "def __init__(self, args): raise SystemExit(0)", "env W: expected a world that .* got SystemExit: 0"),
        ("Env", f"{DRAW}1 / 0", "W.generate: expected a task"),
        ("Env", "def generate(self): pass", "W.generate: expected a task"),
        ("Env", f"{DRAW}'text'", "W.generate: expected a dict"),
        ("Env", f"{DRAW}None", "W.generate: expected a dict"),
        ("Env", f"async {DRAW}{{}}", "W.generate: expected a dict"),
        ("Env", f"{DRAW}{{'prompt': [{{'role': 'user'}}]}}", "expected a text"),
        ("Env", f"{DRAW}{{'prompt': None}}", "expected a text"),
        ("Env", f"{DRAW}{{'prompt': 'a', 'o': object()}}", "expected data that can be written down, .* type object"),
        (
            "Env",
            f"{DRAW}{{'prompt': 'a', 'o': {{1: 2}}}}",
            "expected data that can be written down, with texts as keys",
        ),
        ("Env", f"{DRAW}{{'prompt': 'a\\ud800'}}", "expected data that can be written down, .* UnicodeEncodeError"),
    ],
)
def test_an_object_that_is_no_world_is_refused(tmp_path: Path, base: str, body: str, said: str) -> None:
    (tmp_path / "w.py").write_text(BODY.format(base=base, body=body))
    with pytest.raises(BadInput, match=said):
        load_env(EnvConfig(name=f"{tmp_path}/w.py:W", held_out=2)).tasks("eval", 0)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "exactly one of name, reward, rubric and guest"),
        ({"name": "a", "reward": "b"}, "exactly one of name, reward, rubric and guest"),
        ({"reward": "r.py:f"}, "reward needs data"),
        ({"name": "a", "tools": ("python",)}, "tools belongs to reward"),
        ({"name": "a", "eval_data": "x"}, "eval_data needs data"),
    ],
)
def test_invalid_combinations_of_keys_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        EnvConfig(**given)


REWARD = "def reward(completion: str, answer: str) -> float:\n    return 1.0 if completion == answer else 0.0\n"


def reward_config(folder: Path, rows: list[dict[str, Any]], code: str = REWARD, **more: Any) -> EnvConfig:
    (folder / "reward.py").write_text(code)
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return EnvConfig(reward=f"{folder}/reward.py:reward", data=f"{folder}/data.jsonl", **more)


ROWS = [{"question": f"{i} + 1", "solution": i + 1} for i in range(40)]


def test_a_reward_function_over_a_file(tmp_path: Path) -> None:
    config = reward_config(tmp_path, ROWS, columns={"prompt": "question", "answer": "solution"}, tools=("python",))
    factory = load_env(msgspec.convert(msgspec.to_builtins(config), EnvConfig), read_rows)
    assert [t.name for t in factory.make().tools] == ["python"]
    task = factory.tasks("demonstration", 0).next()
    assert task is not None and task.box is not None
    assert asyncio.run(reward_of(factory.make(), task, str(task.data["answer"]))) == 1.0, (
        "a number column meets a str hint"
    )
    assert asyncio.run(reward_of(factory.make(), task, "no")) == 0.0


async def reward_of(world: Any, task: Task, text: str) -> float | None:
    await world.open(task, None)
    return (await world.score(finished(answer(text), task=task.id))).reward


def test_held_out_prompts_never_train_whatever_the_order_of_the_file(tmp_path: Path) -> None:
    rows = [{"prompt": f"What is {i % 30}?", "answer": str(i)} for i in range(40)]
    factory = load_env(reward_config(tmp_path, rows), read_rows)
    turned = load_env(reward_config(tmp_path, rows[::-1]), read_rows)
    held_out = drain(factory.tasks("eval", 0))
    assert len(held_out) == 6
    assert {t.messages for t in held_out} == {t.messages for t in drain(turned.tasks("eval", 5))}
    source = factory.tasks("train", 0)
    train = [source.next() for _ in range(200)]
    assert overlap(held_out, train) == set()
    epochs = [[t.id for t in train[i : i + 32]] for i in (0, 32)]
    assert sorted(epochs[0]) == sorted(epochs[1]) and len(set(epochs[0])) == 32
    assert epochs[0] != epochs[1]


def test_eval_data_takes_its_prompts_out_of_training(tmp_path: Path) -> None:
    (tmp_path / "eval.jsonl").write_text('{"prompt": "what is  7?", "answer": "7"}\n')
    rows = [{"prompt": f"What is {i}?", "answer": str(i)} for i in range(10)]
    factory = load_env(reward_config(tmp_path, rows, eval_data=f"{tmp_path}/eval.jsonl"), read_rows)
    assert len(drain(factory.tasks("demonstration", 0))) == 9


def test_rows_of_one_prompt_are_distinguished_by_a_key_column(tmp_path: Path) -> None:
    rows = [{"prompt": "Your move.", "answer": str(i), "key": "no key", "board": i % 20} for i in range(40)]
    with pytest.raises(BadInput, match="expected fewer than the 1 different prompts"):
        load_env(reward_config(tmp_path, rows), read_rows)
    factory = load_env(reward_config(tmp_path, rows, columns=Columns(key="board")), read_rows)
    held_out, train = drain(factory.tasks("eval", 0)), factory.tasks("train", 0)
    shown = [train.next() for _ in range(32)]
    assert len({t.key for t in held_out}) == len(held_out) == 4 and overlap(held_out, shown) == set()
    assert {t.key for t in [*held_out, *shown]} == set(map(str, range(20)))
    with pytest.raises(BadInput, match="data.jsonl, row 2: expected a key"):
        load_env(
            reward_config(tmp_path, [rows[0], {"prompt": "a", "answer": "1"}], columns=Columns(key="board")), read_rows
        )


@pytest.mark.parametrize(
    ("rows", "code", "more", "said"),
    [
        ([{"prompt": "a", "answer": "1"}], REWARD, {}, "env.held_out: expected fewer than the 1 different prompts"),
        (ROWS, REWARD, {}, "data.jsonl:1: expected a column"),
        ([{"prompt": "a"}, {"prompt": "b"}], REWARD, {}, "task reward/train/1: expected a column 'answer'"),
        ([{"prompt": "a", "answer": "b", "id": 1}] * 2, REWARD, {}, "expected rows"),
        (ROWS, "reward = 3\n", {}, "env.reward: expected a function"),
    ],
)
def test_data_that_does_not_fit_is_refused(
    tmp_path: Path, rows: list[dict[str, Any]], code: str, more: dict[str, Any], said: str
) -> None:
    with pytest.raises(BadInput, match=said):
        load_env(reward_config(tmp_path, rows, code, **more), read_rows)


def drain(source: Any) -> list[Task]:
    return list(iter(source.next, None))
