"""A run whose trainer and engine take turns: the record of a run in which both have their memory to themselves."""

from __future__ import annotations

import os
import signal
from contextlib import closing
from pathlib import Path

import pytest
from own_processes import started
from test_fleet_run import check_same, words
from test_local_cluster import LOCAL, engines

from sparring.cli.main import main
from sparring.store.sqlite import SqliteStore

STAGES = 'run.stages=["rl", "eval"]'
COLOCATE = "cluster.colocate=true"


@pytest.mark.usefixtures("own")
def test_taking_turns_changes_no_bit(given: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words(given, "turns", STAGES, COLOCATE)) == 0
    assert "sleeps while its trainer computes" in capsys.readouterr().out
    check_same(given, "turns", capsys)


@pytest.mark.full
@pytest.mark.parametrize(
    "further",
    [
        ("cluster.kind=local",),
        ("cluster.kind=local", "cluster.engines=2", "cluster.ranks=2"),
        ("rl.minibatches=2", "rl.passes=2"),
    ],
    ids=["engine process", "engines and ranks", "several steps"],
)
def test_so_it_does_in_processes_and_with_several_steps(
    further: tuple[str, ...], given: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    beside = tuple(setting for setting in further if not setting.startswith("cluster."))
    assert main(words(given, "own", STAGES, *beside)) == 0
    assert main(words(given, "turns", STAGES, COLOCATE, *further)) == 0
    check_same(given, "turns", capsys)


@pytest.mark.full
def test_an_evaluation_beside_is_of_one_version(given: Path) -> None:
    assert main(words(given, "turns", STAGES, COLOCATE, "eval.every=2", "eval.every_tasks=4")) == 0
    evaluated = 0
    with closing(SqliteStore(given.parent / "runs/turns/store.sqlite", read_only=True)) as store:
        for step in (2, 4):
            for group in store.groups(stage=f"rl/eval/{step}"):
                for rollout in group.rollouts:
                    for segment in rollout.trajectories[0].segments:
                        if segment.versions:
                            assert set(segment.versions.values) <= {step}
                            evaluated += 1
    assert evaluated >= 8


@pytest.mark.full
@pytest.mark.kills
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["dies", "stands still"])
def test_an_engine_that_is_lost_in_its_sleep_costs_the_run_nothing(
    how: signal.Signals, given: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    longer = (STAGES, "rl.steps=30", "observe.lines_every_s=0.01")
    assert main(words(given, "own", *longer)) == 0
    with started(given, "turns", *longer, *LOCAL, COLOCATE) as run:
        assert run.stdout is not None
        output, hits = list[str](), 0
        for line in run.stdout:
            output.append(line)
            if line.startswith("rl ") and hits < 2:
                os.kill(engines(given.parent)[0], how)
                hits += 1
        assert run.wait() == 0, "".join(output)
    assert hits == 2
    check_same(given, "turns", capsys)
