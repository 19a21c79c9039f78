"""A whole run whose rollouts are sampled with truncation: trained exactly (law 2), replayed to the bit (law 8)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sparring.cli.main import main

LIMITS = ("rollout.sampling.top_p=0.9", "rollout.sampling.top_k=50", "rollout.sampling.min_p=0.02")


def test_truncated_rollouts_are_trained_exactly_and_replayed(given: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ('run.stages=["rl"]', "rl.steps=2", "rl.train.save_every=1", *LIMITS)
    assert main(["run", str(given), *(word for setting in settings for word in ("--set", setting))]) == 0
    folder = given.parent / "runs" / "tiny"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line["values"] for line in lines if line["stage"] == "rl" and "step" in line]
    assert len(steps) == 2 and all(values["tokens_trained"] > 0 for values in steps)
    assert [(values["logprob_max_abs_diff"], values["ratio"]) for values in steps] == [(0.0, 1.0)] * 2
    for rollout in ("rl/0/0", "rl/3/2"):
        capsys.readouterr()
        assert main(["replay", str(folder), rollout]) == 0
        assert capsys.readouterr().out.endswith("identical, bit for bit\n")
