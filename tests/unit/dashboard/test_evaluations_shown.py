"""Evaluations in the report: a run's own, those beside it, and those beside its training."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from sparring.dashboard.report import write_report
from sparring.observe.evaluation import Evaluation, Lost, TaskResult, passes, success_rate
from sparring.observe.evaluation import mean_reward as reward_of
from sparring.observe.results import RESULT, Evaluated, Results, write_results
from sparring.observe.statistics import pass_hat_k
from sparring.store.sqlite import SqliteStore


def made(solved: list[tuple[bool, ...]], world: str = "sums") -> Evaluation:
    """An evaluation of tasks with these samples."""
    tasks = {
        f"{world}/{n}": TaskResult(digest=f"{world}{n}", solved=s, rewards=tuple(map(float, s)))
        for n, s in enumerate(solved)
    }
    results, samples = list(tasks.values()), max(map(len, solved))
    return Evaluation(
        success=success_rate(results),
        reward=reward_of(results),
        pass_hat={"2": passes(results, 2, pass_hat_k)},
        samples=samples,
        rollouts=len(solved) * samples,
        lost=(Lost(rollout="eval/3", task="sums/3", failure="JudgeError: judge: 503"),),
        tasks=tasks,
    )


@pytest.fixture(scope="module")
def dom(tmp_path_factory: pytest.TempPathFactory, browse: Callable[[str], str]) -> str:
    """The report of a run that evaluated one checkpoint itself, was evaluated twice since, and once beside its
    training."""
    run = tmp_path_factory.mktemp("run")
    store = SqliteStore(run / "store.sqlite")
    store.put("eval/sft", msgspec.to_builtins(made([(True, False)] * 10 + [(False, False)] * 10)))
    for step, rate in ((10, 0.3), (20, 0.5)):
        store.metric(
            "rl/eval", step, {"success": rate, "success_low": rate - 0.1, "success_high": rate + 0.1, "tasks": 20.0}
        )
    store.close()
    for name, evaluation in (("a", made([(True, True)] * 20)), ("b", made([(True, True)] * 5, "other"))):
        folder = run / "evaluations" / name
        folder.mkdir(parents=True)
        told = Evaluated(name=f"checkpoint {name}", environment="Sums", seed=1, temperature=1.0, evaluation=evaluation)
        write_results(Results(evaluations=(told,)), folder / RESULT)
    return browse(write_report(run).as_uri())


def rows(dom: str) -> list[str]:
    """Of the table of evaluations, without markup."""
    table = re.search(r'<table id="evaluations-table">.*?</table>', dom, re.DOTALL)
    assert table is not None
    return [re.sub(r"<[^>]*>", " ", row) for row in re.findall(r"<tr>.*?</tr>", table[0], re.DOTALL)][1:]


def test_each_has_a_row_with_its_interval(dom: str) -> None:
    own, one, other = rows(dom)
    assert "after sft" in own and "25.0 %" in own and "pass^2 0.0 %" in own and "20 × 2" in own and "1 of 40" in own
    assert "checkpoint a on Sums" in one and "100.0 %" in one and "–" in one
    assert "checkpoint b on Sums" in other


def test_changes_are_against_the_first_of_the_same_tasks(dom: str) -> None:
    own, one, other = rows(dom)
    assert "+75.0 %" in one and "against after sft" in one
    assert "against" not in own and "against" not in other


def test_those_beside_training_have_a_curve_with_its_interval(dom: str) -> None:
    chart = dom[dom.index("Held-out success") :]
    assert "upper end" in chart and "lower end" in chart and "95 % interval" in chart


def test_an_evaluations_own_folder_has_a_report(tmp_path: Path, browse: Callable[[str], str]) -> None:
    SqliteStore(tmp_path / "store.sqlite").close()
    told = Evaluated(name="it", environment="Sums", seed=1, temperature=1.0, evaluation=made([(True, False)]))
    write_results(Results(evaluations=(told,)), tmp_path / RESULT)
    [row] = rows(browse(write_report(tmp_path).as_uri()))
    assert "it on Sums" in row and "50.0 %" in row


@pytest.mark.full
def test_teachers_and_other_runs_stand_beside_the_student(tmp_path: Path, browse: Callable[[str], str]) -> None:
    (tmp_path / "config.toml").write_text(
        '[distill]\nteachers = { "*" = "big" }\n[eval]\nagainst = { imitation = "runs/it" }\n'
    )
    store = SqliteStore(tmp_path / "store.sqlite")
    student, teacher, other = (msgspec.to_builtins(made([(right,)] * 10)) for right in (True, True, False))
    for key, value in (
        ("eval/distill", student),
        ("eval/teacher/big", teacher),
        ("against/imitation", {"evaluation": other}),
    ):
        store.put(key, value)
    store.close()
    own, taught, imitated = rows(browse(write_report(tmp_path).as_uri()))
    assert "after distill" in own and "teacher big, on what it teaches" in taught and "+0.0 %" in taught
    assert "imitation (runs/it)" in imitated and "−100.0 %" in imitated and "against after distill" in imitated
