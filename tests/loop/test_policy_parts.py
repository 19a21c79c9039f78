"""Parts of the algorithm that ask the stage for something: a reference, versions, a coefficient that adapts, a first
pass."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from sparring.cli.main import main

RL = (
    'run.stages=["rl"]',
    "rl.steps=4",
    "rl.minibatches=2",
    "rollout.max_lag=1",
    "observe.progress=off",
    "rl.train.save_every=2",
)
KL = ("algo.kl_reward.coefficient=0.1", "algo.kl_reward.target=0.01")


def run(recipe: Path, name: str, *settings: str) -> tuple[list[dict[str, float]], str]:
    every = (f"run.name={name}", *RL, *settings)
    assert main(["run", str(recipe), *(word for setting in every for word in ("--set", setting))]) == 0
    folder = recipe.parent / "runs" / name
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    weights = hashlib.sha256((folder / "rl/model/model.safetensors").read_bytes()).hexdigest()
    return [line["values"] for line in lines if line["stage"] == "rl" and "step" in line], weights


@pytest.mark.slow
def test_an_adaptive_penalty_in_the_reward(given: Path, checkpoint: Path) -> None:
    """The policy's own start, named as a model, is the reference: the first update's divergence is exactly 0."""
    same = (f"models.old.path={checkpoint}", "algo.kl.reference=old")
    steps, weights = run(given, "named", *KL, *same, "algo.preset=m2po", "algo.anchor=loglinear")
    assert steps[0]["kl_per_trajectory"] == 0.0 and steps[0]["kl_coefficient"] == pytest.approx(0.1 * 0.98)
    assert any(values["kl_per_trajectory"] != 0 for values in steps[2:])
    start, by_start = run(given, "start", *KL, "algo.preset=m2po", "algo.anchor=loglinear")
    assert by_start == weights and [x["kl_coefficient"] for x in start] == [x["kl_coefficient"] for x in steps]
    assert run(given, "without", "algo.preset=m2po", "algo.anchor=loglinear")[1] != weights


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["clip_cov", "vespo", "dppo_kl", "top_entropy", "decoupled_ppo_loglinear"])
def test_a_preset_runs(given: Path, preset: str) -> None:
    steps, _ = run(given, preset, f"algo.preset={preset}")
    assert len(steps) == 4 and all(values["updated"] == 1 for values in steps)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ("algo.kl.coefficient=0.1", "algo.kl.reference=nobody"),
            "expected start, last, average or a model with a path",
        ),
        (
            ("algo.kl.coefficient=0.1", "algo.kl.reference=last", "rl.minibatches=1"),
            "several optimiser steps per update",
        ),
    ],
)
def test_a_reference_that_cannot_be_asked_is_refused(
    given: Path, settings: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(given), *(word for setting in (*RL, *settings) for word in ("--set", setting))]) == 2
    assert message in capsys.readouterr().err
