"""recipes/full-loop.toml, every run of it cut to a step or two: the stages find what those before them wrote."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.numpy import load_file

import sparring
from sparring.errors import BadInput
from sparring.launch.run import run_with_earlier
from sparring.recipe.load import load

RECIPES = Path(__file__).parents[2] / "recipes"
SHORT = {
    "steps": 2,
    "rows_per_step": 2,
    "groups_per_step": 2,
    "group_size": 2,
    "max_tokens": 40,
    "tasks": 4,
}
"""Keys of the recipes, whatever they say there, and how short a run is made of them."""

TALKS = {"steps = 2\nrows_per_step = 2": "steps = 300\nrows_per_step = 8"}
"""What the base model needs to learn to end its replies, so that there is something to imitate."""


@pytest.mark.slow
def test_one_command_runs_the_whole_loop(tmp_path: Path) -> None:
    for file in (
        "full-loop.toml",
        *(f"full-loop/{name}.toml" for name in ("base", "people", "walks", "student", "imitation")),
    ):
        text = (RECIPES / file).read_text()
        text = text.replace('name = "recipes/full-loop/world.py', f'name = "{RECIPES}/full-loop/world.py')
        for key, short in SHORT.items():
            text = re.sub(rf"^{key} = \d+$", f"{key} = {short}", text, flags=re.MULTILINE)
        for short, enough in TALKS.items() if file.endswith("base.toml") else ():
            text = text.replace(short, enough)
        (tmp_path / "recipes/full-loop").mkdir(parents=True, exist_ok=True)
        (tmp_path / "recipes" / file).write_text(text)
    there = {**os.environ, "PYTHONPATH": str(Path(sparring.__file__).parents[1])}
    runs, command = tmp_path / "runs", [sys.executable, "-m", "sparring.cli.main", "run", "recipes/full-loop.toml"]
    subprocess.run(command, cwd=tmp_path, env=there, check=True, timeout=300)
    summary = json.loads((runs / "full-loop/summary.json").read_text())
    assert summary["distill_success"] is not None and set(summary["by_dataset"]) <= {"people", "walks"}
    assert all(other["tasks"] == 4 and other["tokens_trained"] > 0 for other in summary["against"].values())
    assert set(summary["against"]) == {"start", "imitation"}
    size = {name: parameters(runs / name) for name in ("full-loop/export", "full-loop-people/rl/model")}
    assert size["full-loop/export"] <= size["full-loop-people/rl/model"] / 2
    before = (runs / "full-loop-base/sft/model/model.safetensors").stat().st_mtime_ns
    subprocess.run(command, cwd=tmp_path, env=there, check=True, timeout=300)
    assert (runs / "full-loop-base/sft/model/model.safetensors").stat().st_mtime_ns == before


def test_recipes_that_wait_for_each_other_are_refused(tmp_path: Path) -> None:
    recipe = tmp_path / "a.toml"
    recipe.write_text(f'[run]\nname = "a"\nafter = ["{recipe}"]\n[models.policy]\npath = "x"\n[env]\nname = "x"\n')
    with pytest.raises(BadInput, match="run.after"):
        run_with_earlier(load(recipe))


def test_a_misspelt_recipe_is_refused_before_those_ahead_of_it_run(given: Path, tmp_path: Path) -> None:
    first, misspelt, last = (tmp_path / name for name in ("first.toml", "misspelt.toml", "last.toml"))
    first.write_text(given.read_text().replace('name = "tiny"\n', 'name = "first"\nstages = ["export"]\n'))
    misspelt.write_text(given.read_text().replace("[rollout]", "[rolout]"))
    last.write_text(given.read_text().replace('name = "tiny"\n', f'name = "tiny"\nafter = ["{first}", "{misspelt}"]\n'))
    with pytest.raises(BadInput, match="rolout"):
        run_with_earlier(load(last))
    assert not (tmp_path / "runs").exists()
    assert run_with_earlier(load(first)) == tmp_path / "runs/first", "it could have run"


def parameters(folder: Path) -> int:
    return sum(tensor.size for tensor in load_file(folder / "model.safetensors").values())
