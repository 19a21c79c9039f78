"""A policy with recurrent state, through the whole path under fast numerics; refused by name where exactness is asked
for."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from suite import short_of

from sparring.cli.main import main
from sparring.testing.tiny_models import tiny_model

FAMILIES = ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "nemotron_h"]
families = pytest.mark.parametrize("family", short_of(FAMILIES, ["qwen3_5_text"]))


def policy(checkpoint: Path, folder: Path, family: str) -> Path:
    """A tiny model of the family that speaks with the tokenizer of `checkpoint`."""
    config = json.loads((checkpoint / "config.json").read_text())
    same = {name: config[name] for name in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")}
    path = tiny_model(family, folder / family, seed=3, max_position_embeddings=512, **same)
    for file in checkpoint.iterdir():
        if not (path / file.name).exists():
            shutil.copyfile(file, path / file.name)
    return path


def words(recipe: Path, path: Path, *settings: str) -> list[str]:
    every = (f"models.policy.path={path}", *settings)
    return [str(recipe), *(word for setting in every for word in ("--set", setting))]


@pytest.mark.full
@families
def test_a_run_from_imitation_to_export(given: Path, checkpoint: Path, tmp_path: Path, family: str) -> None:
    path = policy(checkpoint, tmp_path, family)
    stages = ('run.stages=["sft", "rl", "eval", "export"]', "models.policy.numerics=fast", "rl.steps=3", "sft.steps=3")
    assert main(["run", *words(given, path, *stages)]) == 0
    folder = tmp_path / "runs" / "tiny"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line["values"] for line in lines if line["stage"] == "rl" and "step" in line]
    assert len(steps) == 3 and all(values["tokens_trained"] > 0 and values["updated"] == 1 for values in steps)
    assert all(0 <= values["logprob_max_abs_diff"] < 1e-3 for values in steps)
    assert max(values["logprob_max_abs_diff"] for values in steps) > 0
    assert 'anchor = "proximal"' in (folder / "config.toml").read_text()
    exported = json.loads((folder / "export/config.json").read_text())
    assert exported["model_type"] == family
    assert main(["check", *words(given, folder / "export", "run.name=again", *stages[1:2], 'run.stages=["rl"]')]) == 0


@families
def test_exact_numerics_are_refused_by_name_before_anything_starts(
    given: Path, checkpoint: Path, tmp_path: Path, family: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = policy(checkpoint, tmp_path, family)
    for verb in ("check", "run"):
        assert main([verb, *words(given, path, 'run.stages=["rl"]')]) == 2
        told = f"expected full or sliding attention in every layer, got a {family} model"
        assert told in capsys.readouterr().err
    assert not (tmp_path / "runs" / "tiny" / "rl").exists()
