"""The promises of the quickstart and its two controls, on the recipes as they are. Slow: about five minutes each."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sparring.recipe.load import load
from sparring.recipe.run_config import RunConfig

RECIPES = Path(__file__).parents[2] / "recipes"


def run(name: str, folder: Path) -> dict[str, Any]:
    recipe = RECIPES / f"{name}.toml"
    command = [sys.executable, "-m", "sparring.cli.main", "run", str(recipe), "--set", f"run.directory={folder}"]
    subprocess.run(command, check=True, timeout=3000)
    return json.loads((folder / name / "summary.json").read_text())


def without(config: RunConfig, *sections: str) -> dict[str, Any]:
    data = msgspec.to_builtins(config)
    return {name: value for name, value in data.items() if name not in ("run", *sections)}


def test_the_controls_differ_from_the_quickstart_in_one_thing() -> None:
    plain, shuffled, lagged = (load(RECIPES / f"quickstart{kind}.toml") for kind in ("", "-shuffled", "-lag2"))
    assert without(shuffled, "algo") == without(plain, "algo")
    assert shuffled.algo.control == "shuffled"
    assert without(lagged, "rollout") == without(plain, "rollout")
    assert lagged.rollout.max_lag == 2


@pytest.mark.slow
def test_the_quickstart_reaches_its_figures(tmp_path: Path) -> None:
    summary = run("quickstart", tmp_path)
    thin = [entry for entry in summary["by_dataset"].values() if entry["coverage"] == "thin"]
    well = [entry for entry in summary["by_dataset"].values() if entry["coverage"] == "well"]
    assert len(thin) + len(well) >= 4
    assert summary["eval_tasks"] >= 500
    assert all(entry["sft"] >= 0.7 for entry in well)
    assert sum(entry["sft"] < 0.4 and entry["rl"] >= 0.8 for entry in thin) >= 2
    assert summary["rl_success"] >= 0.9
    assert all(entry["rl"] >= entry["sft"] - 0.03 for entry in summary["by_dataset"].values())
    assert summary["no_tool_success"] < 0.2
    assert summary["turns_successful"] >= 2
    assert summary["logprob_max_abs_diff"] == 0.0
    assert summary["tokens_sampled"] == sum(n for name, n in summary["tokens"].items() if name != "sampled")


@pytest.mark.slow
def test_permuted_rewards_teach_nothing(tmp_path: Path) -> None:
    summary = run("quickstart-shuffled", tmp_path)
    assert summary["rl_success"] <= summary["sft_success_high"]


@pytest.mark.slow
def test_two_steps_of_lag_reach_the_same_success(tmp_path: Path) -> None:
    summary = run("quickstart-lag2", tmp_path)
    assert 1 <= summary["lag_max"] <= 2
    assert summary["overlap_share"] > 0
    assert summary["rl_success"] >= 0.9
