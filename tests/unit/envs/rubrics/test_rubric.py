"""Parts become one reward: weights, gates, domains; functions; what is refused."""

from __future__ import annotations

import asyncio
import json
import re
import tomllib
import typing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sparring.envs.base import Env
from sparring.envs.config import EnvConfig
from sparring.envs.factory import WorldFactory
from sparring.envs.registry import load_env
from sparring.envs.rubrics.config import Part
from sparring.envs.rubrics.rubric import Rubric
from sparring.envs.rubrics.workers import Workers
from sparring.errors import BadInput, JudgeError
from sparring.sandbox.bubblewrap import BubblewrapBoxes
from sparring.sandbox.config import SandboxConfig
from sparring.tasks.files import read_rows
from sparring.types import Score, Task

RIGHT = {"kind": "exact"}
MARKED = {"kind": "regex", "pattern": "^ok", "weight": 0.5}
LONG = {"kind": "regex", "pattern": ".{9}", "weight": -0.25}
FUNCTIONS = """
import asyncio

def length(completion: str) -> int:
    return len(completion)

async def double(answer: str, task) -> float:
    return 2.0 * len(answer) if task.data["answer"] == 7 else 0.0

def broken(completion: str) -> float:
    raise KeyError(completion)

def nothing(completion: str) -> float:
    return None

async def slow(completion: str) -> float:
    await asyncio.Event().wait()
"""


@pytest.fixture(scope="module")
def workers() -> Workers:
    return Workers(1)


def score_of(workers: Workers, parts: dict[str, Any], completion: str, **data: Any) -> Score:
    rubric = Rubric(msgspec.convert(parts, dict[str, Part]), workers=workers)
    return asyncio.run(rubric.score(completion, Task(id="t", env="e", messages=(), data={"answer": "ok", **data})))


def test_the_reward_is_the_weighted_sum_and_says_its_parts(workers: Workers) -> None:
    parts = {"right": RIGHT, "marked": MARKED, "long": LONG}
    assert score_of(workers, parts, "ok") == Score(reward=1.5, parts={"right": 1, "marked": 1, "long": 0}, success=True)
    assert score_of(workers, parts, "ok but long") == Score(
        reward=0.25, parts={"right": 0, "marked": 1, "long": 1}, success=False
    )
    assert score_of(workers, {"right": RIGHT, "marked": MARKED | {"decides": True}}, "ok.").success is True
    assert score_of(workers, {"long": LONG}, "x").success is None, "nothing decides"


def test_an_empty_answer_is_worth_nothing(workers: Workers) -> None:
    absent = {"kind": "regex", "pattern": "^(?!.*no)"}
    assert score_of(workers, {"absent": absent}, "x").reward == 1
    assert score_of(workers, {"absent": absent, "long": LONG}, "").reward == 0


def test_a_failed_gate_ends_scoring_or_caps_the_reward(workers: Workers, tmp_path: Path) -> None:
    (tmp_path / "f.py").write_text(FUNCTIONS)
    broken = {"kind": "function", "function": f"{tmp_path}/f.py:broken"}
    gate = {"kind": "regex", "pattern": "^<", "gate": 1.0, "weight": 0.0}
    assert score_of(workers, {"broken": broken, "gate": gate}, "ok") == Score(
        reward=0.0, parts={"gate": 0.0}, success=False
    )
    with pytest.raises(JudgeError, match="env.rubric.broken: KeyError: '<ok'"):
        score_of(workers, {"broken": broken, "gate": gate}, "<ok")
    capped = {"right": RIGHT, "gate": gate | {"cap": 0.3}}
    assert score_of(workers, capped, "ok") == Score(reward=0.3, parts={"right": 1, "gate": 0}, success=False)
    assert score_of(workers, capped, "<").reward == 0
    worse = {"long": LONG, "gate": gate | {"cap": 0.3}}
    assert score_of(workers, worse, "very long text").reward == -0.25, "a cap raises nothing"


def test_rows_are_routed_by_their_domain(workers: Workers) -> None:
    parts = {"right": RIGHT | {"domains": ["words"]}, "same": {"kind": "number", "domains": ["sums"]}, "marked": MARKED}
    assert score_of(workers, parts, "ok", domain="words").parts == {"right": 1, "marked": 1}
    assert score_of(workers, parts, "ok 5", domain="sums", answer=5) == Score(
        reward=1.5, parts={"same": 1, "marked": 1}, success=True
    )
    assert score_of(workers, parts, "ok", domain="other").parts == {"marked": 1}


def test_functions_are_called_by_the_names_of_their_parameters(workers: Workers, tmp_path: Path) -> None:
    (tmp_path / "f.py").write_text(FUNCTIONS)
    parts = {name: {"kind": "function", "function": f"{tmp_path}/f.py:{name}"} for name in ("length", "double")}
    assert score_of(workers, parts, "abc", answer=7) == Score(
        reward=5.0, parts={"length": 3, "double": 2}, success=True
    )


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("broken", "env.rubric.f: KeyError: 'x'"),
        ("nothing", "env.rubric.f: expected a finite number"),
        ("slow", "env.rubric.f.function: no answer after 0.01 s"),
    ],
)
def test_a_function_that_fails_is_no_reward(workers: Workers, tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / "f.py").write_text(FUNCTIONS)
    part = {"kind": "function", "function": f"{tmp_path}/f.py:{name}", "timeout_s": 0.01 if name == "slow" else 60.0}
    with pytest.raises(JudgeError, match=said):
        score_of(workers, {"f": part}, "x")


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ({"kind": "exact", "weight": 0}, "a part of weight 0 must have a gate"),
        ({"kind": "exact", "cap": 0.5}, "cap must be left out without a gate"),
        ({"kind": "exact", "find": "("}, "find must be a regular expression"),
        ({"kind": "regex", "pattern": "["}, "pattern must be a regular expression"),
        ({"kind": "json", "fields": ["a"]}, "fields must be left out without a column"),
        ({"kind": "judge", "model": "m", "prompt": "Well?", "choices": {"A": 1}}, "prompt must contain {completion}"),
        ({"kind": "judge", "model": "m", "prompt": "{completion}"}, "exactly one of choices and range"),
        ({"kind": "judge", "model": "m", "prompt": "{completion}", "range": [2, 1]}, "the lower first"),
        (
            {"kind": "judge", "model": "m", "prompt": "{completion}", "choices": {"A": 2}},
            "the values of choices must lie between 0 and 1",
        ),
        (
            {"kind": "judge", "model": "m", "prompt": "{completion}", "range": [0, 1], "samples": 2},
            "above 0 for several samples",
        ),
        ({"kind": "pairwise", "model": "m", "prompt": "{first}", "choices": {"A": 1}}, "{second}"),
        ({"kind": "ranking", "model": "m", "prompt": "{answers}", "gate": 0.5}, "must have neither gate nor decides"),
        ({"kind": "wishful"}, "Invalid value 'wishful'"),
    ],
)
def test_an_invalid_part_is_refused(part: dict[str, Any], said: str) -> None:
    with pytest.raises(msgspec.ValidationError) as refused:
        msgspec.convert(part, Part)
    assert said in str(refused.value)


def config(folder: Path, rows: list[dict[str, Any]], rubric: dict[str, Any], **more: Any) -> EnvConfig:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return msgspec.convert({"data": f"{folder}/rows.jsonl", "rubric": rubric, **more}, EnvConfig)


def test_the_world_on_the_page(tmp_path: Path) -> None:
    """docs/rewards.md, its Python as it stands there."""
    page = Path(__file__).parents[4] / "docs/rewards.md"
    [source] = re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    (tmp_path / "world.py").write_text(source)
    factory = load_env(EnvConfig(name=f"{tmp_path}/world.py:World", held_out=4), read_rows)
    task = factory.tasks("train", 0).next()
    assert task is not None

    async def played(completion: str) -> Score:
        env = factory.make()
        assert isinstance(env, Env)
        await env.open(task, None)
        return await env.reward(completion, task)

    assert asyncio.run(played(f"It is {task.data['answer']}.")).parts == {"right": 1.0, "short": 1.0}
    assert asyncio.run(played("It may well be " * 9 + "-1")).reward == 0.0


ROWS = [{"question": f"{i} + 1 = ?", "answer": f"{i} plus one is\n#### {i + 1}", "domain": "sums"} for i in range(10)]


def test_a_world_of_rows(tmp_path: Path) -> None:
    part = {"kind": "number", "column_find": "#### (.+)", "domains": ["sums"]}
    factory = load_env(
        config(tmp_path, ROWS, {"right": part}, columns={"prompt": "question"}, tools=["python"]), read_rows
    )
    task = factory.tasks("eval", 0).next()
    assert task is not None and task.tag == "sums" and task.box is not None
    assert [tool.name for tool in factory.make().tools] == ["python"] and factory.scorer is None

    async def played() -> tuple[Score, Score]:
        env = factory.make()
        assert isinstance(env, Env)
        await env.open(task, None)
        right = task.data["answer"].split("#### ")[1]
        return await env.reward(f"It is {right}.", task), await env.reward(f"It is {right}0.", task)

    assert [score.reward for score in asyncio.run(played())] == [1, 0]


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ({"kind": "exact", "domains": ["words"]}, "task rubric/train/1, domain: expected one of words"),
        (
            {"kind": "regex", "pattern": "x", "gate": 1, "weight": 0},
            "task rubric/train/1: expected a part of env.rubric with a weight",
        ),
        (
            {"kind": "exact", "column": "solution"},
            "task rubric/train/1, env.rubric.x: column solution: expected a column",
        ),
        ({"kind": "code"}, "env.rubric.x: column tests: expected a list of"),
        (
            {"kind": "judge", "model": "m", "prompt": "{completion}", "range": [0, 1]},
            "env.rubric.x: expected models that judge",
        ),
        ({"kind": "ranking", "model": "m", "prompt": "{answers}"}, "env.rubric.x: expected models that judge"),
        ({"kind": "function", "function": "nowhere.py:f"}, "env.rubric.x.function: expected a Python file nowhere.py"),
    ],
)
def test_an_unscorable_row_is_refused_before_the_run(tmp_path: Path, part: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput) as refused:
        load_env(config(tmp_path, ROWS, {"x": part}, columns={"prompt": "question"}), read_rows)
    assert said in str(refused.value)


def test_rows_that_are_conversations_are_checked_too(tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": row["question"]}], "solution": "1"} for row in ROWS]
    with pytest.raises(BadInput, match="column answer: expected a column of this name"):
        load_env(config(tmp_path, rows, {"x": {"kind": "exact"}}), read_rows)


PAGE = Path(__file__).parents[4] / "docs" / "rewards.md"


def test_the_recipe_on_the_page_is_one() -> None:
    text = PAGE.read_text()
    recipe = tomllib.loads(text.partition("```toml\n")[2].partition("```")[0])
    rubric = msgspec.convert(recipe["env"], EnvConfig).rubric
    assert list(rubric) == ["right", "marked", "clear"]
    kinds = set(re.findall(r"`(\w+)`", "\n".join(re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", text, flags=re.MULTILINE))))
    assert kinds == {kind.__struct_config__.tag for kind in typing.get_args(Part)}


@pytest.mark.full
def test_a_right_answer_read_in_part_is_refused_with_file_and_row(tmp_path: Path) -> None:
    """What a part compares with is read when the file is, and what math-verify makes of it when it is proven."""
    boxes = BubblewrapBoxes(SandboxConfig(servers=1))  # which no part asks for
    rows = tmp_path / "rows.jsonl"

    def world(kind: str, gold: Any) -> WorldFactory:
        golds = ["1", "2", "1 000", gold]
        lines = (json.dumps({"prompt": f"{n}?", "answer": answer}) for n, answer in enumerate(golds))
        rows.write_text("\n".join(lines))
        return load_env(EnvConfig(rubric={"right": msgspec.convert({"kind": kind}, Part)}, data=str(rows)), read_rows)

    with pytest.raises(BadInput, match=r"rows.jsonl, row 4: .*env.rubric.right: column answer: expected a number"):
        world("number", "12 34")
    with pytest.raises(BadInput, match="rows.jsonl, row 4: .*reads whole"):
        asyncio.run(world("math", "1_000").prove(boxes))
    assert asyncio.run(world("math", r"\$1{,}000").prove(boxes)) == (0, 0)
