"""PRIME: an implicit process reward model learns beside the policy which rollouts were right, and its token rewards are
credited."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from sparring.cli.main import main
from sparring.store.sqlite import SqliteStore

CHANCE = f"env.name={Path(__file__).parent / 'tiny_world.py'}:Chance"
SETTINGS = [CHANCE, "observe.progress=off", "rl.minibatches=2", "rl.passes=2"]
SETTINGS += ["algo.credit.name=prime", "algo.credit.beta=0.5", "rl.implicit.train.learning_rate=0.003"]


@pytest.mark.full
def test_policy_and_implicit_model_end_with_the_same_bits_after_a_resume(whole_and_resumed) -> None:
    (whole, resumed), metrics = whole_and_resumed(SETTINGS, ("model", "implicit"))
    assert whole == resumed and len(set(whole[1])) == 2
    assert (Path(whole[0]["implicit"]) / "tokenizer.json").is_file()
    for values in metrics:
        assert values["implicit/learning_rate"] == 0.003 and values["learning_rate"] == 0.001
        assert values["optimiser_steps"] == 8, "two minibatches and two passes of each model"
        assert "implicit/logprob_max_abs_diff" not in values and values["logprob_max_abs_diff"] == 0.0
    # every sampled token of the groups that stay teaches it, once a pass
    account = whole[0]["account"]
    assert sum(values["implicit/tokens_trained"] for values in metrics) == 2 * (
        account["sampled"] - account["filtered"]
    )


def test_it_begins_as_its_reference(given: Path, tmp_path: Path) -> None:
    """The first rewards are exactly 0 and the loss log 2; the advantages are then RLOO's alone."""
    run_tiny(
        given, "rl.steps=2", "algo.credit.name=prime", "algo.credit.beta=1.0", "rl.implicit.train.learning_rate=0.003"
    )
    run_tiny(given, "rl.steps=1", "algo.credit=rloo", "run.name=rloo")
    ours, theirs = (step_metrics(tmp_path, name) for name in ("tiny", "rloo"))
    assert ours[0]["implicit/reward_chosen"] == ours[0]["implicit/reward_rejected"] == 0.0
    assert ours[0]["implicit/loss_preference"] == pytest.approx(math.log(2)) and ours[0]["implicit/accuracy"] == 0.5
    assert ours[0]["loss_policy"] == pytest.approx(theirs[0]["loss_policy"], abs=1e-6)
    assert ours[0]["grad_norm"] == pytest.approx(theirs[0]["grad_norm"], rel=1e-5)
    assert ours[1]["implicit/reward_chosen"] != ours[1]["implicit/reward_rejected"]


@pytest.mark.slow
def test_an_implicit_model_of_another_run_goes_on(given: Path, tmp_path: Path) -> None:
    """It knows from the start what the first run's has learned. A policy with an adapter has one, too, and the
    reference may follow the policy."""
    common = [
        "algo.preset=prime",
        "algo.difficulty.lowest=0",
        "algo.difficulty.highest=1",
        "rl.implicit.train.learning_rate=0.003",
    ]
    run_tiny(given, *common, "rl.steps=3")
    others = [f"models.judge.path={tmp_path / 'runs/tiny/rl/implicit'}", "rl.implicit.model=judge", "rl.steps=1"]
    run_tiny(given, *common, *others, "run.name=second")
    [first] = step_metrics(tmp_path, "second")
    assert first["implicit/reward_chosen"] != 0.0 and step_metrics(tmp_path, "tiny")[0]["implicit/reward_chosen"] == 0.0
    run_tiny(given, *common, "rl.implicit.model=policy", "models.policy.lora.rank=4", "rl.steps=2", "run.name=third")
    assert step_metrics(tmp_path, "third")[1]["implicit/grad_norm"] > 0
    run_tiny(given, *common, "algo.kl.reference=average", "rl.steps=3", "run.name=fourth")
    values = step_metrics(tmp_path, "fourth")
    assert values[0]["implicit/reward_chosen"] == 0.0 != values[-1]["implicit/reward_chosen"]


REFUSED = [
    (
        ["algo.credit=prime"],
        "rl.implicit: expected a table",
    ),
    (
        ["rl.implicit.model=policy"],
        "rl.implicit: expected no table",
    ),
    (
        ["algo.preset=prime", "rl.implicit.model=policy", "rl.preference.name=dpo"],
        "uses it, got rl.preference",
    ),
    (
        ["algo.preset=prime", "rl.implicit.model=judge"],
        "rl.implicit.model: expected one of policy",
    ),
    (["algo.preset=prime", "rl.implicit.train.learning_rat=1"], "rl.implicit.train.learning_rat: expected one of"),
    (["algo.preset=prime", "algo.credit.beta=0"], "beta must be above 0"),
    (
        ["algo.preset=prime", "rl.implicit.model=policy", "rollout.group_size=1"],
        "rollout.group_size: expected at least 2 rollouts",
    ),
]


@pytest.mark.parametrize(("overrides", "message"), REFUSED, ids=[" ".join(overrides) for overrides, _ in REFUSED])
def test_contradicting_settings_are_refused(given: Path, capfd, overrides: list[str], message: str) -> None:
    words = [word for override in ("run.stages=['rl']", *overrides) for word in ("--set", override)]
    assert main(["check", str(given), *words]) == 2
    assert message in capfd.readouterr().err


def run_tiny(recipe: Path, *overrides: str) -> None:
    words = [word for override in ("run.stages=['rl']", CHANCE, *overrides) for word in ("--set", override)]
    assert main(["run", str(recipe), *words]) == 0


def step_metrics(tmp_path: Path, name: str) -> list[dict[str, float]]:
    store = SqliteStore(tmp_path / f"runs/{name}/store.sqlite", read_only=True)
    metrics = [values for _, values in store.metrics("rl")]
    store.close()
    return metrics
