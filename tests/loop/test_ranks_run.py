"""A run whose trainer is several processes has the tokens and weights of one that trains in its own process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from own_processes import processes_with, started
from test_fleet_run import check_ended, check_same, words

from sparring.cli.main import main
from sparring.store.sqlite import SqliteStore

Wait = Callable[[subprocess.Popen[str], str], None]
STAGES = 'run.stages=["rl", "eval"]'
LOUD = (STAGES, "observe.lines_every_s=0.01")
TWO = ("cluster.kind=local", "cluster.ranks=2", "cluster.engine_threads=1")
THREE = ("cluster.kind=local", "cluster.ranks=3", "cluster.engine_threads=1")
SHARDS = ("cluster.shard=parameters",)


def ranks_of(folder: Path) -> list[int]:
    """Process ids of the ranks of a run beside whose recipe its temporary files stand."""
    return processes_with("sparring.cluster.rank_process", folder)


@pytest.mark.full
@pytest.mark.parametrize(
    "layout",
    [pytest.param(TWO, marks=pytest.mark.slow, id="optimiser"), pytest.param((*TWO, *SHARDS), id="parameters")],
)
def test_ranks_change_no_token_and_no_weight(
    layout: tuple[str, ...], given: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words(given, "own", STAGES)) == 0
    assert main(words(given, "two", STAGES, *layout)) == 0
    check_same(given, "two", capsys)
    own, two = (measured(given.parent / "runs" / name) for name in ("own", "two"))
    assert own == two and len(own) == 6 and all(values["tokens_trained"] > 0 for values in own)


def measured(run: Path) -> list[dict[str, float]]:
    """Metrics of each step of `rl`, but times and what is counted of an engine, whose work depends on its neighbours."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line["values"] for line in lines if line.get("stage") == "rl" and "values" in line]
    timed = ("time/", "engine/", "rollout/wall", "rollout/world_share")
    return [{key: of[key] for key in of if not key.startswith(timed) and not key.endswith("_s")} for of in steps]


@pytest.mark.slow
def test_a_run_moves_between_numbers_of_ranks(given: Path, capsys: pytest.CaptureFixture[str], wait_for: Wait) -> None:
    """It is killed three times, each time with another number of ranks, and goes on with one."""
    assert main(words(given, "own", STAGES)) == 0
    for moment, layout in (("rl 1/6", TWO), ("rl 3/6", (*THREE, *SHARDS)), ("rl 4/6", TWO)):
        with started(given, "moved", *LOUD, *layout) as run:
            wait_for(run, moment)
            run.kill()
    assert main(words(given, "moved", STAGES)) == 0
    check_same(given, "moved", capsys)


@pytest.mark.full
@pytest.mark.parametrize(
    ("how", "stopped"),
    [
        (signal.SIGINT, False),
        pytest.param(signal.SIGTERM, False, marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, False, marks=pytest.mark.slow),
        (signal.SIGKILL, True),
    ],
)
def test_a_run_that_ends_leaves_no_rank(how: signal.Signals, stopped: bool, given: Path, wait_for: Wait) -> None:
    """Neither one that is stopped, and so does not notice its end."""
    with started(given, "ended", *LOUD, "rl.steps=1000", *TWO) as run:
        wait_for(run, "rl ")
        there = ranks_of(given.parent)
        if stopped:
            os.kill(there[0], signal.SIGSTOP)
        run.send_signal(how)
        assert run.stdout is not None
        run.stdout.read()
    assert len(there) == 2
    check_ended(there)
    assert {path.name for path in given.parent.iterdir()} == {"given.toml", "runs"}


def check_survives(
    given: Path,
    kills: int,
    how: signal.Signals,
    capsys: pytest.CaptureFixture[str],
    layout: tuple[str, ...] = TWO,
) -> None:
    """Check that a run whose ranks are lost in turn ends as an undisturbed one."""
    longer = (f"rl.steps={3 * kills + 3}", "cluster.timeout_s=4")
    assert main(words(given, "own", *LOUD, *longer)) == 0
    output, hit = list[str](), 0
    with started(given, "hit", *LOUD, *longer, *layout) as run:
        assert run.stdout is not None
        for line in run.stdout:
            output.append(line)
            if line.startswith("rl ") and hit < kills and int(line.split("/")[0].split()[1]) > 3 * hit:
                os.kill(sorted(ranks_of(given.parent))[hit % 2], how)
                hit += 1
        assert run.wait() == 0, "".join(output)
    text = "".join(output)
    assert hit == kills and text.count("ranks are started again") >= kills, text
    assert not ranks_of(given.parent) and {path.name for path in given.parent.iterdir()} == {"given.toml", "runs"}
    check_same(given, "hit", capsys)


@pytest.mark.full
@pytest.mark.parametrize(
    "how",
    [pytest.param(signal.SIGKILL, marks=pytest.mark.slow, id="dies"), pytest.param(signal.SIGSTOP, id="stands still")],
)
def test_a_rank_that_is_lost_costs_the_run_nothing(
    how: signal.Signals, given: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check_survives(given, 1, how, capsys)


@pytest.mark.full
def test_three_kills_of_ranks_cost_the_run_nothing(given: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check_survives(given, 3, signal.SIGKILL, capsys)


@pytest.mark.kills
@pytest.mark.slow
def test_ten_kills_of_ranks_with_a_lag_keep_what_was_published(given: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tokens depend on when updates meet them, so the run is compared with what it has recorded: no version has been
    published twice, and a replay gives each of them the same weights."""
    kills, hit, output = 10, 0, list[str]()
    slow = f"env.name={Path(__file__).parent / 'tiny_world.py'}:Slow"
    lag = ('run.stages=["rl"]', LOUD[1], slow, "rollout.max_lag=2", "rl.steps=60", "rl.train.save_every=3")
    with started(given, "hit", *lag, *TWO) as run:
        assert run.stdout is not None
        for line in run.stdout:
            output.append(line)
            if line.startswith("rl ") and hit < kills and int(line.split("/")[0].split()[1]) > 5 * hit:
                os.kill(sorted(ranks_of(given.parent))[hit % 2], signal.SIGKILL)
                hit += 1
        assert run.wait() == 0, "".join(output)
    assert hit == kills and "".join(output).count("ranks are started again") >= kills, "".join(output)
    folder = given.parent / "runs/hit"
    with closing(SqliteStore(folder / "store.sqlite", read_only=True)) as store:
        published = [entry.name for _, entry in store.entries("rl", kinds=["published"])]
    assert len(published) == len(set(published)) == 60
    assert main(["replay", str(folder)]) == 0, capsys.readouterr().out


@pytest.mark.full
def test_a_lost_rank_that_had_its_shard_of_the_parameters_costs_the_run_nothing(
    given: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other rank waits in the middle of a gathering."""
    check_survives(given, 1, signal.SIGKILL, capsys, (*TWO, *SHARDS))


@pytest.mark.kills
@pytest.mark.slow
def test_ten_kills_of_ranks_cost_the_run_nothing(given: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check_survives(given, 10, signal.SIGKILL, capsys)
