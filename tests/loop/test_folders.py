"""A reward model's folder in the place of a policy, a teacher, a judge, an export or a served model: every command that
opens it says what it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sparring.cli.main import main
from sparring.model.load import load
from sparring.model.save import save


@pytest.fixture
def judge(checkpoint: Path, tmp_path: Path) -> Path:
    """A reward model with random weights over the tiny policy."""
    model = load(checkpoint, head="new scalar")
    with torch.no_grad():
        model.state()["score.weight"].normal_(generator=torch.Generator().manual_seed(1))
    return save(model.state(), checkpoint, tmp_path / "judge")


def test_no_command_takes_a_reward_model_for_a_language_model(given: Path, judge: Path, tmp_path: Path, capfd) -> None:
    start = given.read_text()
    policy = tmp_path / "policy.toml"
    policy.write_text(start[: start.index('path = "')] + f'path = "{judge}"\n' + start[start.index("\n\n[env]") :])
    teacher = ["run.stages=['distill']", f"models.old.path={judge}", "distill.teachers={'*'='old'}"]
    words = [word for override in teacher for word in ("--set", override)]
    said = (
        f"{judge}/config.json: expected a language model, got Qwen3ForSequenceClassification, a reward model or critic"
    )
    for command in (
        ["check", str(policy), "--set", "run.stages=['rl']"],
        ["check", str(given), *words],
        ["eval", str(given), str(judge)],
        ["serve", str(judge), "--port", "0"],
        ["chat", str(judge)],
    ):
        assert main(command) == 2, command
        assert said in capfd.readouterr().err, command


def test_a_reward_model_is_exported_with_its_head_and_scores(given: Path, judge: Path, tmp_path: Path, capfd) -> None:
    assert main(["export", str(judge), str(tmp_path / "out"), "--dtype", "bfloat16"]) == 0
    before, after = (load_file(folder / "model.safetensors") for folder in (judge, tmp_path / "out"))
    assert after.keys() == before.keys() and after["score.weight"].equal(before["score.weight"].bfloat16())
    words = ["--set", "run.stages=['rl']", "--set", "rl.reward_model=judge", "--set", f"models.judge.path={judge}"]
    assert main(["check", str(given), *words]) == 0
    assert "is the padding" not in capfd.readouterr().out
    config = json.loads((judge / "config.json").read_text())
    end = config["eos_token_id"]
    (judge / "config.json").write_text(json.dumps({**config, "pad_token_id": end[0] if isinstance(end, list) else end}))
    assert main(["check", str(given), *words]) == 0
    assert f"'<|im_end|>', which ends replies, is the padding of {judge}: its scores are read before it" in (
        capfd.readouterr().out
    )
