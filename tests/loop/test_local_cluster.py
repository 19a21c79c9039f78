"""Engines in processes of their own, which the run starts, starts again when they die, and ends."""

from __future__ import annotations

import json
import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
from own_processes import processes_with, started
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_fleet_run import check_ended, check_same, words

from sparring.cli.main import main
from sparring.dashboard.page_data import figures
from sparring.store.sqlite import SqliteStore

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
    longer = (STAGES, "rl.steps=30", "observe.lines_every_s=0.01", 'observe.sinks=["jsonl", "tensorboard"]')
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
    check_told(given.parent / "runs/local", "".join(output), number)


def events_of(run: Path) -> list[dict[str, Any]]:
    """Events of parts in `metrics.jsonl`, each of which the store and TensorBoard have once, too, and the page shows."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    every, of_parts = [line for line in lines if "event" in line], [line for line in lines if "kind" in line]
    store = SqliteStore(run / "store.sqlite", read_only=True)
    recorded, shown = store.events(), figures(run, store)["events"]
    store.close()
    told = EventAccumulator(str(run / "tensorboard"), size_guidance={"tensors": 0})
    told.Reload()
    tags = [tag for tag in told.Tags()["tensors"] if tag.endswith("/events")]
    assert sum(len(told.Tensors(tag)) for tag in tags) == len(recorded)
    for line in (*every, *of_parts, *recorded, *shown):
        line.pop("time", None)
    assert recorded == every and shown == of_parts
    return of_parts


def check_told(run: Path, output: str, number: int) -> None:
    """What the run with a lost engine says of its engines: as they start, when one is lost and when it is back; and the
    figures of each where there are several."""
    events, names = events_of(run), list(range(number))
    starts = [event["event"] for event in events if event["kind"] == "engine starts"]
    assert starts[0] == f"starting {number} engine{'s' * (number > 1)}" and "ready after" in starts[-1]
    assert sorted(event["engine"] for event in events if " is ready (http" in event["event"]) == names
    lost, back = ([event for event in events if event["kind"] == f"engine {what}"] for what in ("lost", "back"))
    assert len(lost) == 1 >= len(back) >= (number == 1) and lost[0]["engine"] in names, (
        "others may end the stage before"
    )
    assert lost[0]["stage"] == "rl" and lost[0]["node"] == socket.gethostname() and lost[0]["reason"]
    assert lost[0]["moved"] >= 0 and 0 <= lost[0]["at_step"] <= 30
    assert all(event["engine"] == lost[0]["engine"] and event["at_step"] >= lost[0]["at_step"] for event in back)
    assert all(f"{event['stage']}: {event['event']}" in output for event in events)
    steps = [values for line in (run / "metrics.jsonl").open() if (values := json.loads(line).get("values"))]
    figures_of = {name for values in steps for name in values if name.startswith("engine/") and name.count("/") == 2}
    each = ("completions", "tokens_per_s", "requests_now")
    assert figures_of == ({f"engine/{name}/{figure}" for name in names for figure in each} if number > 1 else set())


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
