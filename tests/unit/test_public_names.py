"""What a user imports from `sparring`: every name is there, has a page, and says what is wrong with a wrong use."""

from __future__ import annotations

import asyncio
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from refusals import refused_at

import sparring
from sparring import Engine, Env, Message, Task, check, evaluate, load_recipe, run, tool
from sparring.errors import BadInput
from sparring.recipe.run_config import RunConfig

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "recipes" / "quickstart.toml"
PROMISED = "Env tool Task Message Score ToolError run load_recipe check evaluate Engine".split()


class Shop(Env):
    """Tells prices that its task has."""

    @tool
    def price(self, item: str) -> int:
        """Look up a price."""
        return self.task.data[item]

    def reward(self, completion: str, task: Task) -> bool:
        return completion == task.data["answer"]


def test_every_name_is_there_and_has_a_page() -> None:
    assert set(PROMISED) < set(sparring.__all__) and sparring.__all__ == sorted(set(sparring.__all__))
    assert set(dir(sparring)) >= set(sparring.__all__)
    for name in sparring.__all__:
        assert getattr(sparring, name).__doc__
    written = runpy.run_path(str(ROOT / "docs" / "write_reference.py"))["pages"]()
    committed = {path.name: path.read_text() for path in (ROOT / "docs/reference").glob("*.md")}
    assert committed == written, "run: python docs/write_reference.py"
    assert written.keys() == {"index.md", *(f"{name}.md" for name in sparring.__all__)}
    assert "def evaluate(\n" in written["evaluate.md"] and "- `ks`: values of k" in written["evaluate.md"]
    assert "class Engine:\n    def __init__(" in written["Engine.md"] and "## `generate`" in written["Engine.md"]
    with pytest.raises(AttributeError, match="no attribute 'Environment'; it has Engine, Env, "):
        sparring.Environment  # noqa: B018


def test_importing_it_imports_nothing_and_a_world_imports_no_torch() -> None:
    code = """
import sys
import sparring
print([name for name in sys.modules if name.startswith("sparring.")])
from sparring import Env, Message, PythonTool, Score, Task, ToolCall, ToolError, tool
print([name for name in ("torch", "transformers") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("[]\n[]\n", "")


@pytest.mark.parametrize("verb", [run, check, evaluate], ids=lambda verb: verb.__name__)
@pytest.mark.parametrize("given", [str(QUICKSTART), QUICKSTART, {"run": {"name": "a"}}, None], ids=repr)
def test_a_verb_refuses_values_that_are_no_recipe(verb: Any, given: object) -> None:
    more = ["runs/quickstart"] if verb is evaluate else []
    with pytest.raises(BadInput) as refused:
        verb(given, *more)
    text = str(refused.value)
    assert (
        refused.value.where == f"sparring.{verb.__name__}"
        and f"a recipe (RunConfig), got {type(given).__name__}" in text
    )
    assert "sparring.load_recipe" in text and ("from_data" in text) == isinstance(given, dict)


@pytest.mark.parametrize(
    ("path", "overrides", "words"),
    [
        ({"run": {}}, (), "sparring.load_recipe: expected the path"),
        (None, (), "sparring.load_recipe: expected the path"),
        (QUICKSTART, "rl.steps=3", "sparring.load_recipe: overrides: expected several"),
        (QUICKSTART, {"rl.steps": None}, "sparring.load_recipe: rl.steps: expected a text, a number, "),
        (QUICKSTART, {"rl.stepps": 3}, "--set rl.stepps=3: rl.stepps: expected one of "),
        ("no such.toml", (), "no such.toml: expected a recipe"),
    ],
)
def test_load_recipe_refuses_invalid_paths_and_overrides(path: Any, overrides: Any, words: str) -> None:
    with pytest.raises(BadInput) as refused:
        load_recipe(path, overrides)
    assert str(refused.value).startswith(words)


def test_load_recipe_replaces_keys() -> None:
    as_text = ['run.name="3"', "rl.steps=7", "env.limits={max_turns = 2}", "eval.ks=[1]", "rl.train.learning_rate=1e-5"]
    as_values = {
        "run.name": "3",
        "rl.steps": 7,
        "env.limits": {"max_turns": 2},
        "eval.ks": (1,),
        "rl.train.learning_rate": 1e-5,
    }
    config = load_recipe(QUICKSTART, as_values)
    assert config == load_recipe(str(QUICKSTART), as_text)
    assert (config.run.name, config.rl.steps, config.env.limits.max_turns, config.eval.ks) == ("3", 7, 2, (1,))
    assert load_recipe(QUICKSTART, {"env.args.datasets.0.weight": 3.5}).env.args["datasets"][0]["weight"] == 3.5


@pytest.mark.parametrize(
    ("checkpoints", "settings", "words"),
    [
        ((), {}, "sparring.evaluate: expected at least one checkpoint"),
        ((3,), {}, "sparring.evaluate: expected paths"),
        (("recipes",), {}, "recipes: expected a Hugging Face checkpoint"),
        (
            ("nowhere",),
            {},
            "nowhere: expected a Hugging Face checkpoint",
        ),
        (("nowhere",), {"samples": "two"}, "sparring.evaluate: eval.samples: expected an integer"),
        (("http://x",), {}, "http://x: expected a tokenizer"),
    ],
)
def test_evaluate_refuses_paths_without_a_checkpoint(
    checkpoints: tuple[Any, ...], settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(BadInput) as refused:
        evaluate(load_recipe(QUICKSTART), *checkpoints, **settings)
    assert str(refused.value).startswith(words)


@pytest.mark.parametrize(
    ("given", "settings", "words"),
    [
        (3, {}, "sparring.Engine: expected the path"),
        (
            ROOT / "recipes",
            {},
            f"{ROOT}/recipes: expected a Hugging Face checkpoint",
        ),
        (
            str(ROOT / "none"),
            {},
            f"model {ROOT}/none: expected a Hugging Face checkpoint",
        ),
        (".", {"max_running": 0}, "sparring.Engine: max_running: expected 1"),
    ],
)
def test_engine_refuses_a_path_without_a_checkpoint(given: Any, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput) as refused:
        Engine(given, **settings)
    assert str(refused.value).startswith(words)


def test_an_environment_without_a_task_says_so() -> None:
    world = Shop()
    with refused_at("Shop.task", "an environment that was not opened"):
        world.price("bread")
    task = Task(id="a", env="shop", messages=(Message(role="user", content="?"),), data={"bread": 3})
    asyncio.run(world.open(task, None))
    assert world.price("bread") == 3 and world.task is task


def test_a_struct_with_wrong_types_is_refused(tmp_path: Path) -> None:
    whole = load_recipe(QUICKSTART, {"run.directory": tmp_path})
    assert isinstance(whole, RunConfig)
    wrong = msgspec.structs.replace(whole, rl=msgspec.structs.replace(whole.rl, steps=2.5))
    with pytest.raises(BadInput, match=r"sparring.check: rl.steps: expected an integer"):
        check(wrong)
