"""A whole run on the real vLLM: rollouts by another implementation than the trainer's, measured per step and
corrected."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from real_vllm import PYTHON

from sparring.cli.main import main
from sparring.errors import BadInput
from sparring.launch.replay import replay_rollout

pytestmark = pytest.mark.vllm

LOOP = Path(__file__).parents[1] / "loop"
STEPS = 3


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The tiny recipe with heads as large as vLLM's attention on a CPU wants them."""
    said = (
        f"run.directory={tmp_path_factory.mktemp('runs')}",
        f"env.name={LOOP}/tiny_world.py:Sums",
        "models.policy.init.head_dim=32",
        'run.stages=["init", "rl", "export"]',
        f"rl.steps={STEPS}",
        "engine.kind=vllm",
        f"engine.vllm.python={PYTHON}",
        'engine.vllm.arguments=["--enforce-eager"]',
        "engine.kv.bytes=67108864",
    )
    return [word for one in said for word in ("--set", one)]


def test_a_run_trains_with_updates_and_reports_the_mismatch_of_each_step(
    settings: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", str(LOOP / "tiny.toml"), *settings, "--set", "rl.train.learning_rate=0.01"]) == 0
    out = capsys.readouterr().out
    assert "rl: correction token weights of at most 2: engine vllm in exact numerics does not agree" in out
    folder = Path(settings[1].removeprefix("run.directory=")) / "tiny"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line["values"] for line in lines if line["stage"] == "rl" and "step" in line]
    assert len(steps) == STEPS and all(values["tokens_trained"] > 0 and values["updated"] for values in steps)
    for values in steps:
        # every token was sampled under the weights that are trained, by other kernels
        assert values["logprob_stale_share"] == 0.0
        assert 0 < values["logprob_mean_abs_diff"] <= values["logprob_max_abs_diff"] < 1e-3
        assert 0 <= values["mismatch_k3"] < 1e-6 and 0.999 < values["mismatch_ess"] <= 1.0
        assert values["correction_weight"] == pytest.approx(1.0, abs=1e-3) and values["correction_truncated"] == 0.0
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["correction"] == "token weights of at most 2" and summary["logprob_max_abs_diff"] > 0
    assert 'anchor = "proximal"' in (folder / "config.toml").read_text()
    assert "logprob difference" in out and "effective samples" in out
    with pytest.raises(BadInput, match='expected a run with engine.kind = "native"'):
        replay_rollout(folder, "rl/0/0")
