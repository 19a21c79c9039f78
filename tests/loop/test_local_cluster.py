"""Engines in processes of their own, which the run starts, starts again when they die, and ends."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from own_processes import processes_with, started
from test_fleet_run import check_ended, check_same, words

from sparring.cli.main import main

pytestmark = pytest.mark.full
STAGES = 'run.stages=["rl", "eval"]'
LOCAL = ("cluster.kind=local", "cluster.engines=2", "cluster.engine_threads=1", "engine.silent_s=2")


def engines(folder: Path) -> list[int]:
    """Process ids of the engines of a run beside whose recipe its temporary files stand."""
    return processes_with("--until-input-ends", folder)


@pytest.mark.parametrize(
    ("how", "number"),
    [
        (signal.SIGKILL, 2),
        pytest.param(signal.SIGSTOP, 2, marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, 1, marks=pytest.mark.slow),
    ],
    ids=["dies", "stands still", "the only one dies"],
)
def test_engines_of_their_own_change_nothing_and_are_started_again(
    how: signal.Signals, number: int, given: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    longer = (STAGES, "rl.steps=30", "observe.lines_every_s=0.01")
    assert main(words(given, "own", *longer)) == 0
    with started(given, "local", *longer, *LOCAL, f"cluster.engines={number}") as run:
        assert run.stdout is not None
        output, hit = list[str](), 0
        for line in run.stdout:
            output.append(line)
            if line.startswith("rl ") and not hit:
                hit = engines(given.parent)[0]
                os.kill(hit, how)
        assert run.wait() == 0, "".join(output)
    assert hit and "is left out" in "".join(output)
    assert not engines(given.parent) and {path.name for path in given.parent.iterdir()} == {"given.toml", "runs"}
    check_same(given, "local", capsys)


def test_the_engines_of_a_stage_serve_the_next_ones(given: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those of an evaluation's checkpoints too."""
    stages = ('run.stages=["sft", "rl", "eval"]', 'eval.checkpoints=["sft", "rl"]', "observe.lines_every_s=0.01")
    assert main(words(given, "own", *stages)) == 0
    with started(given, "local", *stages, *LOCAL) as run:
        assert run.stdout is not None
        output, seen, during = list[str](), set[int](), set[str]()
        for line in run.stdout:
            output.append(line)
            seen.update(there := engines(given.parent))
            during |= {line.partition(" ")[0]} if there else set()
        assert run.wait() == 0, "".join(output)
    assert {"rl", "eval"} <= during and len(seen) == 2, "".join(output)
    check_same(given, "local", capsys)


@pytest.mark.parametrize("how", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGKILL])
def test_a_run_that_ends_leaves_no_engine(how: signal.Signals, given: Path) -> None:
    with started(given, "ended", STAGES, "rl.steps=1000", "observe.lines_every_s=0.01", *LOCAL) as run:
        assert run.stdout is not None
        for line in run.stdout:
            if line.startswith("rl "):
                there = engines(given.parent)
                run.send_signal(how)
                break
        run.stdout.read()
    assert len(there) == 2
    check_ended(there)
