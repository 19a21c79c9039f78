"""A newest checkpoint that cannot be read is passed over by one command, and the run ends as if it had been whole."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

import pytest
from safetensors.torch import load_file

from sparring.cli.main import main
from sparring.store.sqlite import SqliteStore


@pytest.mark.full
def test_the_steps_behind_it_are_trained_again_from_the_record(
    given: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ('run.stages=["rl"]', "rl.steps=4", "rl.train.save_every=1", "rl.train.keep_last=2")
    words = ["run", str(given), *(word for setting in settings for word in ("--set", setting))]
    folder = tmp_path / "runs/tiny"
    assert main(words) == 0
    before = load_file(folder / "rl/model/model.safetensors")
    with closing(SqliteStore(folder / "store.sqlite")) as store:
        sampled = len(list(store.groups(stage="rl")))
        store.put("stage/rl", None)  # as if it was killed behind its last update
    os.truncate(folder / "rl/checkpoints/step-000004/model.safetensors", 100)
    capsys.readouterr()
    assert main(words) == 1
    told = capsys.readouterr().err
    assert "step-000004: cannot be read" in told and "--set run.damaged=pass_over" in told
    assert main([*words, "--set", "run.damaged=pass_over"]) == 0
    assert "the checkpoint of step 4 is damaged: passed over" in capsys.readouterr().out
    assert (folder / "rl/checkpoints/damaged-step-000004").is_dir()
    after = load_file(folder / "rl/model/model.safetensors")
    assert all(before[name].equal(after[name]) for name in before)
    with closing(SqliteStore(folder / "store.sqlite", read_only=True)) as store:
        assert len(list(store.groups(stage="rl"))) == sampled, "nothing is sampled again"
    assert main(["replay", str(folder)]) == 0
