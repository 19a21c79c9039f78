"""docs/recipes.md names every recipe; the one for a real checkpoint loads, and scores rows of its file's form."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from sparring import load_recipe
from sparring.envs.registry import load_env
from sparring.tasks.files import read_rows
from sparring.types import Message, Outcome, Segment, Trajectory

ROOT = Path(__file__).resolve().parents[2]
RECIPES = [
    path
    for path in sorted((ROOT / "recipes").rglob("*.*"))
    if path.name == "in_python.py" or (path.suffix == ".toml" and "command" not in tomllib.loads(path.read_text()))
]  # a file with a command is a preset of a program
ROWS = [
    {"question": f"Tom has {n} apples and buys {n + 1}. How many has he?", "answer": f"{n} + {n + 1}\n#### {2 * n + 1}"}
    for n in range(1, 9)
]


def test_every_recipe_stands_in_the_gallery() -> None:
    named = re.findall(
        r"^\| \[[^]]+\]\(\.\./(recipes/\S+)\)", (ROOT / "docs/recipes.md").read_text(), flags=re.MULTILINE
    )
    assert sorted(named) == sorted(path.relative_to(ROOT).as_posix() for path in RECIPES)


@pytest.mark.parametrize("recipe", [p for p in RECIPES if p.suffix == ".toml"], ids=lambda path: path.stem)
def test_every_recipe_loads_and_says_what_it_is(recipe: Path) -> None:
    assert recipe.read_text().startswith("# ") and load_recipe(recipe).run.name


def test_gsm8k_is_unverified_and_its_rubric_reads_the_rows(tmp_path: Path) -> None:
    recipe = ROOT / "recipes" / "gsm8k.toml"
    assert "`unverified`" in recipe.read_text().partition("\n")[0]
    config = load_recipe(recipe)
    assert (config.models["policy"].path, config.models["policy"].numerics) == ("Qwen/Qwen3-0.6B", "exact")
    (tmp_path / "data/gsm8k").mkdir(parents=True)
    for name, rows in (("train", ROWS[:6]), ("test", ROWS[6:])):
        (tmp_path / f"data/gsm8k/{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with contextlib.chdir(tmp_path):
        factory = load_env(config.env, read_rows)
    task = factory.tasks("eval", 0).next()
    assert task is not None and task.messages[1].content in {row["question"] for row in ROWS[6:]}
    right = task.data["answer"].rpartition(" ")[2]

    async def reward(text: str) -> float | None:
        env = factory.make()
        await env.open(task, None)
        reply = Segment(
            index=0, parent=None, source="expert", tokens=(), message=Message(role="assistant", content=text)
        )
        outcome = Outcome(kind="completed", reason="answered")
        score = await env.score(Trajectory(id="r", task=task.id, role="policy", segments=(reply,), outcome=outcome))
        return score and score.reward

    assert asyncio.run(reward(f"Both together.\n#### {right}")) == 1.0
    assert asyncio.run(reward(f"Both together.\n#### {right}0")) == asyncio.run(reward(f"It is {right}")) == 0.0


@pytest.mark.slow
def test_the_script_trains_evaluates_and_writes_the_report(tmp_path: Path) -> None:
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    script = ROOT / "recipes" / "in_python.py"
    lines = [line for line in script.read_text().splitlines() if line.strip() and not line.startswith('"""')]
    assert len(lines) <= 20
    command = [sys.executable, str(script), "2"]
    env = {"BROWSER": "true", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^before \d.*\nafter \d.*\nchange ", done.stdout, flags=re.MULTILINE)
    assert "</html>" in (tmp_path / "runs/in-python-2/report.html").read_text()
