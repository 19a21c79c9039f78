"""The stages eval and export take the best checkpoint where the recipe names what is best."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from safetensors.torch import load_file

from sparring.cli.main import main
from sparring.launch.checkpoint import CONFIG
from sparring.recipe.load import load
from sparring.stages.context import RunFiles
from sparring.stages.runtime.checkpoint_choice import chosen_weights
from sparring.store.sqlite import SqliteStore

SETTINGS = (
    'run.stages=["rl", "eval", "export"]',
    "rl.steps=2",
    "rl.train.save_every=1",
    'train.best_metric="learning_rate"',  # of equal values the first is the best
    "eval.tasks=2",
    "eval.no_tool_tasks=1",
)


def same(one: Path, other: Path) -> bool:
    before, after = (load_file(folder / "model.safetensors") for folder in (one, other))
    return all(before[name].equal(after[name]) for name in before)


def test_the_best_is_evaluated_and_exported_by_name_and_an_evaluation_ends_as_it_began(
    given: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["run", str(given), *(word for setting in SETTINGS for word in ("--set", setting))]
    assert main(words) == 0
    said, run = capsys.readouterr().out, tmp_path / "runs/tiny"
    line = "rl/best: the weights of step 1, learning_rate 0.001"
    assert f"eval: {line}" in said and f"export: {line}" in said
    first = run / "rl/weights/step-000001"
    assert same(run / "export", first) and not same(run / "export", run / "rl/model")
    with closing(SqliteStore(run / "store.sqlite")) as store:
        files = RunFiles(config=load(run / CONFIG), folder=run, store=store)
        taken = {weights: chosen_weights(files, "rl", weights)[0] for weights in ("auto", "best", "last")}
        assert taken == {"auto": first, "best": first, "last": run / "rl/model"}
        for key in ("stage/eval", "stage/export", "eval/rl"):  # stopped
            store.put(key, None)
        store.put("eval/rl/weights", "last")
        store.supersede("eval/rl", 1)
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "eval: rl: the last weights; those of step 1 are rl/best" in said and f"export: {line}" in said
