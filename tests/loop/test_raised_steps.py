"""A run is given more steps after its end: it goes on, as one that had as many from the start."""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from pathlib import Path

import pytest
from safetensors.torch import load_file
from suite import short_of

from sparring.cli.main import main
from sparring.launch.checkpoint import find_checkpoint
from sparring.store.sqlite import SqliteStore

STAGES = 'run.stages=["rl", "eval", "export"]'


def run(recipe: Path, name: str, steps: int, *settings: str) -> int:
    every = (f"run.name={name}", f"rl.steps={steps}", STAGES, "eval.no_tool_tasks=0", "eval.tasks=4", *settings)
    return main(["run", str(recipe), *(part for setting in every for part in ("--set", setting))])


def bits(folder: Path) -> dict[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in load_file(folder / "model.safetensors").items()}


@pytest.mark.full
def test_a_finished_run_goes_on(given: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = tmp_path / "runs"
    assert run(given, "short", 2) == 0
    before = bits(runs / "short/export")
    with closing(SqliteStore(runs / "short/store.sqlite", read_only=True)) as store:
        evaluated = store.get("eval/rl")
    capsys.readouterr()
    assert run(given, "short", 4) == 0 and run(given, "whole", 4) == 0
    assert "rl.steps: 2 -> 4" in capsys.readouterr().out
    for stage in ("rl/model", "export"):
        assert bits(runs / "short" / stage) == bits(runs / "whole" / stage) != before
    assert main(["diff", str(runs / "short"), str(runs / "whole")]) == 0, capsys.readouterr().out
    assert main(["replay", str(runs / "short")]) == 0
    assert "weights of steps 1 to 4 are the recorded ones" in capsys.readouterr().out
    assert "steps = 2" in (runs / "short/config.begun.toml").read_text()
    assert "steps = 4" in (runs / "short/config.toml").read_text()
    with closing(SqliteStore(runs / "short/store.sqlite", read_only=True)) as store:
        (change,) = store.get("raised/rl")
        assert (change["before"], change["steps"]) == (2, 4) and change["results"]["eval"]["rl"] == evaluated
        assert store.get("eval/rl") == store.get("stage/eval")["rl"]
    assert run(given, "short", 2) == 2
    assert "rl.steps (4 -> 2)" in capsys.readouterr().err
    assert run(given, "short", 5, "rollout.group_size=2") == 2
    said = capsys.readouterr().err
    assert "rollout.group_size (3 -> 2)" in said and "rl.steps (" not in said


@pytest.mark.parametrize("lag", short_of([0, 1], [1]))
def test_a_run_that_was_killed_goes_on_with_more(
    given: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], lag: int
) -> None:
    """Behind its last checkpoint: that step is trained again from the record, and the rest is new. Asynchronous too."""
    folder, settings = tmp_path / "runs/tiny", ('run.stages=["rl"]', "rl.train.save_every=1", f"rollout.max_lag={lag}")
    assert run(given, "tiny", 2, *settings) == 0
    before = bits(folder / "rl/model")
    shutil.rmtree(folder / "rl/checkpoints/step-000002")
    with closing(SqliteStore(folder / "store.sqlite")) as store:
        store.put("stage/rl", None)
    assert run(given, "tiny", 3, *settings) == 0
    assert bits(find_checkpoint(folder / "rl/step-000002")) == before != bits(folder / "rl/model")
    assert json.loads((folder / "summary.json").read_text())["raised"] == {"rl": [{"before": 2, "steps": 3}]}
    assert main(["replay", str(folder)]) == 0
    assert "weights of steps 1 to 3 are the recorded ones" in capsys.readouterr().out


@pytest.mark.full
def test_a_schedule_keeps_its_length(given: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One that ends at a learning rate of 0 has nothing to go on with."""
    cosine = 'rl.train.schedule="cosine"'
    assert run(given, "cosine", 2, cosine, "rl.train.min_ratio=0.5", 'run.stages=["rl"]') == 0
    assert run(given, "zero", 1, cosine, 'run.stages=["rl"]') == 0
    capsys.readouterr()
    assert run(given, "zero", 4, cosine, 'run.stages=["rl"]') == 2
    assert "rl.steps: expected 1, or a schedule of the policy that ends above 0" in capsys.readouterr().err
    words = [f"rl.steps={4}", cosine, "rl.train.min_ratio=0.5", 'run.stages=["rl"]', "run.name=cosine"]
    settings = [part for word in (*words, "eval.no_tool_tasks=0", "eval.tasks=4") for part in ("--set", word)]
    assert main(["check", str(given), *settings]) == 0
    assert "schedule cosine of the policy keeps its length of 2 steps, and 0.0005 from there on" in (
        capsys.readouterr().out
    )
    assert run(given, "cosine", 4, cosine, "rl.train.min_ratio=0.5", 'run.stages=["rl"]') == 0
    with closing(SqliteStore(tmp_path / "runs/cosine/store.sqlite", read_only=True)) as store:
        rates = [values["learning_rate"] for _, values in store.metrics("rl")]
    assert rates[2:] == pytest.approx([5e-4, 5e-4]) and rates[0] > rates[2]
    assert main(["replay", str(tmp_path / "runs/cosine")]) == 0


@pytest.mark.full
def test_saved_steps_have_names_in_every_verb(given: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also of a run that was moved. What they stand for is what the checkpoint holds."""
    assert (
        run(given, "saved", 3, 'run.stages=["rl"]', "rl.train.save_every=1", 'train.best_metric="rollout/reward"') == 0
    )
    folder = tmp_path / "moved"
    (tmp_path / "runs/saved").rename(folder)
    best = json.loads((folder / "rl/best.json").read_text())
    for name, step in {"best": best["step"], "last": 3, "step-000002": 2, "checkpoints/step-000003": 3}.items():
        found = find_checkpoint(folder / "rl" / name)
        saved = load_file(folder / f"rl/checkpoints/step-{step:06d}/model.safetensors")
        assert found == folder / f"rl/weights/step-{step:06d}"
        assert bits(found) == {key: tensor.numpy().tobytes() for key, tensor in saved.items()}
    assert find_checkpoint(folder / "last") == folder / "rl/weights/step-000003"
    assert bits(folder / "rl/weights/step-000003") == bits(folder / "rl/model")
    capsys.readouterr()
    assert main(["export", str(folder / "rl/best"), str(tmp_path / "out")]) == 0
    said = capsys.readouterr()
    assert said.out == f"{tmp_path / 'out'}\n" and "recorded prompts id by id" in said.err
    assert main(["export", str(folder / "rl/step-000009"), str(tmp_path / "no")]) == 2
    assert "expected a checkpoint of the stage: step-000" in capsys.readouterr().err
    words = [str(given), str(folder / "rl/best"), str(folder / "rl/last"), "--tasks", "2"]
    assert main(["eval", *words, "--set", "eval.no_tool_tasks=0"]) == 0
    assert "task by task" in capsys.readouterr().out
