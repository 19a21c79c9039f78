"""A run's result is compared with those of earlier runs and of `sparring eval`, task by task; the differences are in
its summary."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from sparring.cli.main import main
from sparring.dashboard.report import write_report
from sparring.stages.runtime.baselines import last_evaluated
from sparring.store.sqlite import SqliteStore

CHANCE, SUMS = (f'env.name="{Path(__file__).parent / "tiny_world.py"}:{world}"' for world in ("Chance", "Sums"))
TRAINED = (
    'run.stages=["rl", "eval"]',
    'eval.checkpoints=["rl"]',
    "rl.train={learning_rate=1e-2}",
    "rl.steps=2",
    "eval.tasks=6",
)
IMITATES = (SUMS, 'run.stages=["sft", "eval"]', 'eval.checkpoints=["sft"]')


def run_folder(given: Path, name: str, *settings: str, code: int = 0) -> Path:
    """The folder of the tiny recipe, run under this name with these settings: by default it evaluates what it is
    given."""
    basis = ("observe.progress=off", CHANCE, 'run.stages=["init", "eval"]', 'eval.checkpoints=["init"]', "eval.tasks=8")
    words = [word for setting in (*basis, "eval.no_tool_tasks=0", *settings) for word in ("--set", setting)]
    assert main(["run", str(given), "--name", name, *words]) == code
    return given.parent / "runs" / name


def summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())


def solved_tasks(folder: Path, stage: str) -> dict[str, list[bool]]:
    """By task, by sample: as the run recorded it."""
    store = SqliteStore(folder / "store.sqlite", read_only=True)
    tasks = store.get(f"eval/{stage}")["tasks"]
    store.close()
    return {name: task["solved"] for name, task in tasks.items()}


def test_the_difference_to_an_earlier_run_is_in_the_summary(given: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = run_folder(given, "before", *TRAINED)
    earlier, theirs = summary(before), solved_tasks(before, "rl")
    capsys.readouterr()
    settings = ("eval.samples=2", f'eval.against={{trained="{before}"}}')
    after = run_folder(given, "after", *settings)
    out, found = capsys.readouterr().out, summary(after)["against"]["trained"]
    ours = summary(after)
    assert (found["figure"], found["tasks"], found["left_out"]) == ("success", 6, 2)
    assert found["value"] == earlier["rl_success"] == sum(right for (right,) in theirs.values()) / 6
    assert found["tokens_trained"] == earlier["tokens_trained"] > 0
    assert found["difference_low"] < found["difference"] < found["difference_high"]
    differences = [sum(solved_tasks(after, "init")[task]) / 2 - theirs[task][0] for task in theirs]
    assert any(differences) and found["difference"] == pytest.approx(sum(differences) / 6, abs=1e-12)
    assert (
        "more than trained, task by task" in out and f"trained on {earlier['tokens_trained']:,} tokens at last" in out
    )
    assert f"trained ({before})" in write_report(after).read_text()
    shutil.rmtree(before)
    run_folder(given, "after", *settings)
    assert summary(after)["against"] == ours["against"], "what was compared is kept with the run"


@pytest.mark.full
def test_the_tokens_that_were_imitated_count(given: Path) -> None:
    before = run_folder(given, "before", *IMITATES)
    store = SqliteStore(before / "store.sqlite", read_only=True)
    trained = store.get("stage/sft")["tokens_trained"]
    store.close()
    found = summary(run_folder(given, "after", SUMS, f'eval.against={{imitation="{before}"}}'))["against"]["imitation"]
    assert trained > 0 and found["tokens_trained"] == trained


def test_only_tasks_that_both_runs_scored_are_compared(given: Path) -> None:
    before = run_folder(given, "before", "eval.tasks=12")
    (before / "summary.json").write_text("{")
    found = summary(run_folder(given, "after", "eval.tasks=4", "eval.samples=3", f'eval.against={{more="{before}"}}'))[
        "against"
    ]["more"]
    both = solved_tasks(given.parent / "runs/after", "init")
    theirs = [solved_tasks(before, "init")[task][0] for task in both]
    assert (len(theirs), found["tasks"], found["left_out"]) == (4, 4, 8)
    assert found["value"] == sum(theirs) / 4 != summary_of(solved_tasks(before, "init"))
    assert found["tokens_trained"] is None, "another's summary that cannot be read costs no comparison"


def summary_of(tasks: dict[str, list[bool]]) -> float:
    return sum(right for (right,) in tasks.values()) / len(tasks)


@pytest.mark.full
def test_a_resumed_run_does_not_read_the_other_again(given: Path) -> None:
    before = run_folder(given, "before")
    settings = ('run.stages=["init", "eval", "export"]', f'eval.against={{other="{before}"}}')
    (given.parent / "runs/after").mkdir()
    (given.parent / "runs/after/export").write_text("in the way")
    with pytest.raises(OSError):
        run_folder(given, "after", *settings)
    shutil.rmtree(before)
    (given.parent / "runs/after/export").unlink()
    assert summary(run_folder(given, "after", *settings))["against"]["other"]["difference"] == 0.0


def test_a_file_of_sparring_eval_is_compared(given: Path, checkpoint: Path) -> None:
    file = given.parent / "fresh.json"
    assert main(["eval", str(given), str(checkpoint), "--set", CHANCE, "--tasks", "8", "--json", str(file)]) == 0
    found = summary(run_folder(given, "after", f'eval.against={{fresh="{file}"}}'))["against"]["fresh"]
    assert (found["difference"], found["tasks"], found["left_out"], found["tokens_trained"]) == (0.0, 8, 0, None)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            ("eval.against={x='nowhere'}",),
            "eval.against.x: expected the folder of a run whose stage eval is done, or an",
        ),
        (("eval.against={x='nowhere.json'}",), "a result file of sparring eval"),
        (("eval.against={x='BEFORE'}", "run.seed=4"), "got another task"),
        (("eval.against={x='BEFORE'}", SUMS), "got none of 8 among"),
        (("eval.against={x='BEFORE'}", 'run.stages=["init"]'), "eval.against: expected a stage eval"),
    ],
)
def test_results_that_cannot_be_compared_are_refused_before_work(
    given: Path, settings: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = run_folder(given, "before")
    capsys.readouterr()
    run_folder(given, "after", *(setting.replace("BEFORE", str(before)) for setting in settings), code=2)
    assert says in capsys.readouterr().err
    assert not (given.parent / "runs/after/config.toml").exists()


def test_the_weights_trained_last_are_compared() -> None:
    assert last_evaluated({"init": 1, "rl": 3, "sft": 2, "no_tool": 5, "teacher/a": 6}) == 3
    assert last_evaluated({"distill": 4, "rl": 3}) == 4 and last_evaluated({"no_tool": 5}) is None
