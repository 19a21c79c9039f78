"""What a policy is held to: a reference over the whole vocabulary, one that moves with it, and a run that was killed
with either."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sparring.cli.main import main

RL = (
    'run.stages=["rl"]',
    "rl.steps=4",
    "rl.train={learning_rate=3e-3, save_every=2}",
    "observe.progress=plain",
    "observe.lines_every_s=0",
)
KL = ("algo.kl.coefficient=0.3", "algo.kl.estimator=full")


def words(*settings: str) -> list[str]:
    return [word for setting in (*RL, *settings) for word in ("--set", setting)]


def run(recipe: Path, name: str, *settings: str) -> tuple[list[dict[str, float]], bytes]:
    """The metrics of each step, and the weights at the end."""
    assert main(["run", str(recipe), *words(f"run.name={name}", *settings)]) == 0
    return losses_and_weights(recipe.parent / "runs" / name)


def losses_and_weights(folder: Path) -> tuple[list[dict[str, float]], bytes]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["values"] for line in lines if line["stage"] == "rl" and "step" in line], told_weights(folder)


@pytest.mark.slow
def test_the_whole_divergence_begins_at_zero_and_holds(given: Path, checkpoint: Path) -> None:
    """To the start under either name the same, to the bit; sampled under a truncation it is over what was kept."""
    free, _ = run(given, "free", "algo.kl.coefficient=1e-9", "algo.kl.estimator=full", "rollout.sampling.top_k=40")
    held = ("algo.kl.coefficient=30.0", "algo.kl.estimator=full", "rollout.sampling.top_k=40")
    start, weights = run(given, "start", *held)
    named, others = run(given, "named", *held, f"models.old.path={checkpoint}", "algo.kl.reference=old")
    assert start[0]["reference_kl"] == 0.0 == named[0]["reference_kl"]
    assert others == weights
    assert all(step["reference_kl"] > 0 for step in start[1:])
    assert start[-1]["reference_kl"] < 0.7 * free[-1]["reference_kl"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        (*KL, "algo.kl.reference=average", "algo.kl.decay=0.5"),
        (*KL, "algo.kl.reference=average", "algo.kl.target=0.02", "models.policy.lora={rank=4}"),
        (*KL, "algo.kl.reference=last", "rl.minibatches=2", "models.policy.dtype=bfloat16"),
        ("algo.kl_reward.coefficient=0.3", "algo.kl.reference=average", "algo.kl.decay=0.5"),
        ('rl.preference={name="dpo"}', "algo.kl.reference=average", "algo.kl.decay=0.5"),
    ],
    ids=["full", "adaptive lora", "last", "reward", "dpo"],
)
def test_a_killed_run_ends_with_the_same_bits(given: Path, settings: tuple[str, ...], killed_and_finished) -> None:
    _, weights = run(given, "whole", *settings)
    killed_and_finished(["run", str(given), *words("run.name=killed", *settings)], ["rl 3/4"])
    assert told_weights(given.parent / "runs/killed") == weights


def told_weights(folder: Path) -> bytes:
    [file] = (folder / "rl/model").glob("*model.safetensors")
    return file.read_bytes()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("algo.kl_reward.estimator=full",), 'set algo.kl.estimator = "full"'),
        ((*KL, "algo.kl.reference=average", "algo.kl.decay=1.0"), "decay must lie between 0 and 1"),
        ((*KL, "algo.kl.reference=last"), "several optimiser steps per update"),
        ((*KL, "algo.kl.reference=average", "models.average.path=HERE"), "models.average: expected another name"),
        (
            ('rl.preference={name="dpo"}', "algo.kl.reference=nobody"),
            "expected start, last, average or a model with a path",
        ),
    ],
)
def test_contradicting_settings_are_refused(
    given: Path, checkpoint: Path, settings: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = [setting.replace("HERE", str(checkpoint)) for setting in settings]
    assert main(["check", str(given), *words(*said)]) == 2
    assert message in capsys.readouterr().err
