"""The distill stage on real parts: a student gets closer to its teachers, is continued to the bit, and is refused what makes no sense."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import msgspec
import pytest

from sparring.cli.main import main
from sparring.model.config import InitConfig
from sparring.model.create import create


@pytest.fixture(scope="session")
def teachers(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two models of another shape than the student, with its tokenizer, that are sure of what they say."""
    folders = []
    for seed in (11, 12):
        out = tmp_path_factory.mktemp("teachers") / str(seed)
        vocab_size = json.loads((checkpoint / "config.json").read_text())["vocab_size"]
        init = InitConfig(hidden_size=48, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16, max_positions=512, initializer_range=0.25)
        create(init, vocab_size, out, seed)
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            if (checkpoint / name).exists():
                shutil.copy(checkpoint / name, out / name)
        folders.append(out)
    return folders[0], folders[1]


def distilled(given: Path, teachers: tuple[Path, ...], *settings: str) -> list[dict[str, float]]:
    """Run the stage; the metrics of its steps."""
    recipe = given.with_name("distil.toml")
    models = "".join(f'\n[models.{name}]\npath = "{path}"\n' for name, path in zip(("even", "odd"), teachers, strict=False))
    routes = '{ even = "even", odd = "odd" }' if len(teachers) == 2 else '{ "*" = "even" }'
    recipe.write_text(given.read_text() + models + f"\n[distill]\nteachers = {routes}\n")
    basis = ('run.stages=["distill"]', "distill.steps=6", "distill.groups_per_step=4", "observe.progress=off")
    words = [word for setting in (*basis, *settings) for word in ("--set", setting)]
    assert main(["run", str(recipe), *words]) == 0
    lines = (given.parent / "runs/tiny/metrics.jsonl").read_text().splitlines()
    return [found["values"] for line in lines if (found := json.loads(line))["stage"] == "distill" and "step" in found]


@pytest.mark.parametrize("kind", ["reverse", "forward", "jensen_shannon"])
@pytest.mark.parametrize("over", ["top_k", "vocabulary"])
def test_a_student_gets_closer(given: Path, teachers: tuple[Path, Path], over: str, kind: str) -> None:
    settings = ("distill.train={learning_rate=3e-3}", f'distill.over="{over}"', f'distill.divergence="{kind}"')
    steps = distilled(given, teachers, *settings)
    print([s["divergence"] for s in steps], [s["time/step_s"] for s in steps])
    assert steps[-1]["divergence"] < steps[0]["divergence"]

@pytest.mark.parametrize("estimator", ["policy_gradient", "squared"])
def test_a_student_gets_closer_by_samples(given: Path, teachers: tuple[Path, Path], estimator: str) -> None:
    settings = ("distill.train={learning_rate=3e-3}", f'distill.estimator="{estimator}"', "distill.steps=20")
    steps = distilled(given, teachers, *settings)
    print([s["distill_gap"] for s in steps])
    assert 0
