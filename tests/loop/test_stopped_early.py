"""A stage that ends by a metric before its last step: with the weights of that step, also after a kill, and on replay."""

from __future__ import annotations

import shutil
from contextlib import closing
from pathlib import Path

import pytest
from safetensors.torch import load_file

from sparring.cli.main import main
from sparring.launch.checkpoint import find_checkpoint
from sparring.store.sqlite import SqliteStore

EVALUATED = ("eval.every=1", "eval.every_tasks=4", 'train.best_metric="rl/eval/reward"')


@pytest.mark.parametrize(
    ("stop", "settings"),
    [
        ('{ metric = "learning_rate", patience = 2 }', ()),
        pytest.param(
            '{ metric = "rl/eval/turns", patience = 2, min_delta = 100.0 }', EVALUATED, marks=pytest.mark.full
        ),
    ],
)
def test_it_ends_and_goes_on_as_ended(
    given: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], stop: str, settings: tuple[str, ...]
) -> None:
    every = ('run.stages=["rl"]', "rl.train.save_every=2", f"rl.stop={stop}", "eval.no_tool_tasks=0", *settings)
    words = ["run", str(given), *(word for setting in every for word in ("--set", setting))]
    folder = tmp_path / "runs/tiny"
    assert main(words) == 0
    assert "rl: may end before step 6" in capsys.readouterr().out
    before = load_file(folder / "rl/model/model.safetensors")
    with closing(SqliteStore(folder / "store.sqlite")) as store:
        result = store.get("stage/rl")
        assert result["ended_early"]["step"] == result["steps"] == 3 and len(store.metrics("rl")) == 3
        store.put("stage/rl", None)  # as if it was killed behind its last update
    shutil.rmtree(folder / "rl/checkpoints/step-000003")
    assert main(words) == 0
    after = load_file(folder / "rl/model/model.safetensors")
    assert all(before[name].equal(after[name]) for name in before)
    with closing(SqliteStore(folder / "store.sqlite", read_only=True)) as store:
        assert store.get("stage/rl")["ended_early"] == result["ended_early"]
        assert store.get("stage/rl")["best"] == result["best"]
    assert find_checkpoint(folder / "rl/best").name == f"step-{result['best']['step']:06d}"
    capsys.readouterr()
    for verb in ("check", "run"):
        assert main([verb, *words[1:], "--set", "rl.steps=8"]) == 2
        assert "rl.steps: expected 6, because the stage ended after step 3: " in capsys.readouterr().err
    with closing(SqliteStore(folder / "store.sqlite", read_only=True)) as store:
        assert store.get("stage/rl")["ended_early"] == result["ended_early"], "nothing is lost"
    assert main(["replay", str(folder)]) == 0
    assert "weights of steps 1 to 3 are the recorded ones" in capsys.readouterr().out
