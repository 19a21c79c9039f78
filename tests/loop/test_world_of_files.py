"""A world whose files import each other, in a recipe's folder far from ours: checked, trained by ranks and engines in
processes, killed, gone on with, evaluated and replayed."""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from forked import Forked, finished
from recipe_files import RECIPES

LAYOUT = ("cluster.kind=local", "cluster.ranks=2", "cluster.engine_threads=1")
SETTINGS = ('run.stages=["rl", "eval"]', "rl.steps=2", "rl.train.save_every=1", "observe.lines_every_s=0", *LAYOUT)


@pytest.fixture
def recipe(given: Path) -> Path:
    """The tiny recipe with the world of recipes/instructions, which it names by its path from the folder of both."""
    shutil.copytree(RECIPES / "instructions", given.parent / "recipes/instructions")
    lines = given.read_text().splitlines()
    at = lines.index("[env]") + 1
    lines[at] = 'name = "recipes/instructions/world.py:Instructions"'
    given.write_text("\n".join(lines))
    return given


@pytest.mark.full
def test_its_files_find_each_other_wherever_it_runs(
    recipe: Path, checkpoint: Path, wait_for: Callable[[subprocess.Popen[str], str], None]
) -> None:
    def done(*words: str | Path) -> str:
        process = finished([str(word) for word in words], cwd=recipe.parent)
        assert process.returncode == 0, process.stdout + process.stderr
        return process.stdout

    settings = [word for setting in SETTINGS for word in ("--set", setting)]
    done("check", recipe, *settings)
    words = ["run", str(recipe), *settings]
    with Forked(words, cwd=recipe.parent, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as run:
        wait_for(run, "rl 1/2")
        run.kill()
        run.communicate()
    assert run.returncode == -signal.SIGKILL
    done(*words)
    assert "identical, bit for bit" in done("replay", recipe.parent / "runs/tiny")
    assert "success" in done("eval", recipe, checkpoint)
