"""The distill stage on real parts: a student gets closer to its teachers, is continued to the bit, and is refused what makes no sense."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from statistics import mean

import pytest
from safetensors.numpy import load_file

from sparring.cli.main import main
from sparring.render.train_tokenizer import MIN_VOCAB_SIZE, train_tokenizer

ROUTES = '{ even = "teacher", "*" = "other" }'


def recipe(given: Path, models: dict[str, Path], routes: str) -> Path:
    """The tiny recipe with teachers."""
    out = given.with_name("distil.toml")
    sections = "".join(f'\n[models.{name}]\npath = "{path}"\n' for name, path in models.items())
    out.write_text(given.read_text() + sections + f"\n[distill]\nteachers = {routes}\n")
    return out


def words(*settings: str) -> list[str]:
    basis = ('run.stages=["distill"]', "distill.steps=6", "distill.groups_per_step=4", "observe.progress=off")
    return [word for setting in (*basis, *settings) for word in ("--set", setting)]


def distilled(given: Path, models: dict[str, Path], *settings: str, routes: str = '{ "*" = "teacher" }') -> list[dict[str, float]]:
    """Run the stage; the metrics of its steps."""
    assert main(["run", str(recipe(given, models, routes)), *words(*settings)]) == 0
    lines = (given.parent / "runs/tiny/metrics.jsonl").read_text().splitlines()
    return [found["values"] for line in lines if (found := json.loads(line))["stage"] == "distill" and "step" in found]


@pytest.fixture(scope="session")
def teacher(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, taught by the world's expert until it is sure of what it says."""
    folder = tmp_path_factory.mktemp("teacher")
    text = (Path(__file__).parent / "tiny.toml").read_text()
    head, rest = text.split("[models.policy.init]")
    world = Path(__file__).parent / "tiny_world.py:Sums"
    text = f'{head}[models.policy]\npath = "{checkpoint}"\n\n[env]{rest.partition("[env]")[2]}'.replace("tests/loop/tiny_world.py:Sums", str(world))
    (folder / "teach.toml").write_text(text)
    settings = ('run.stages=["sft"]', f"run.directory={folder}", "sft.steps=80", "sft.rows_per_step=8", "observe.progress=off")
    settings += ("sft.train={learning_rate=1e-2, save_every=0}",)
    assert main(["run", str(folder / "teach.toml"), *(word for setting in settings for word in ("--set", setting))]) == 0
    return folder / "tiny/sft/model"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["reverse", "forward", "jensen_shannon"])
@pytest.mark.parametrize("over", ["top_k", "vocabulary"])
def test_a_student_gets_closer_to_a_trained_teacher(given: Path, teacher: Path, over: str, kind: str) -> None:
    settings = ("distill.train={learning_rate=3e-3}", f'distill.over="{over}"', f'distill.divergence="{kind}"', "distill.steps=12")
    steps = distilled(given, {"teacher": teacher}, *settings)
    found = [step["divergence"] for step in steps]
    print(over, kind, found)
    assert mean(found[-3:]) < 0.8 * mean(found[:3])
    assert all(step["logprob_max_abs_diff"] == 0.0 for step in steps)


@pytest.mark.slow
def test_a_student_gets_closer_by_what_it_sampled(given: Path, teacher: Path) -> None:
    steps = distilled(given, {"teacher": teacher}, "distill.train={learning_rate=3e-3}", "distill.steps=30")
    found = [step["distill_gap"] for step in steps]
    print(found)
    assert mean(found[-5:]) < 0.8 * mean(found[:5])
