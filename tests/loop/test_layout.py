"""A run that goes on with another layout, other threads and another place of its engine, has the bits of one that did
not move."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from forked import Forked

from sparring.cli.main import main
from sparring.recipe.load import load_recorded

Served = Callable[..., AbstractContextManager[tuple[subprocess.Popen[str], str]]]
WaitFor = Callable[[subprocess.Popen[str], str], None]


def command(recipe: Path, name: str, *settings: str) -> list[str]:
    """The words of a run of the rl stage."""
    words = ('run.stages=["rl", "eval"]', "observe.lines_every_s=0", *settings)
    return ["run", str(recipe), "--name", name, *(word for setting in words for word in ("--set", setting))]


@pytest.mark.slow
def test_a_run_that_moved_often_has_the_tokens_and_weights_of_one_that_stood_still(
    given: Path, checkpoint: Path, served: Served, wait_for: WaitFor, capsys: pytest.CaptureFixture[str]
) -> None:
    runs, dropped = given.parent / "runs", 'engine.kv.across_turns="drop"'
    assert main(command(given, "still")) == 0

    def stopped(moment: str, *layout: str) -> None:
        words = command(given, "moved", *layout)
        with Forked(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as run:
            wait_for(run, moment)
            run.kill()
            run.communicate()
        assert run.returncode == -signal.SIGKILL

    with served(str(checkpoint)) as (_, url):
        stopped("rl 1/6", "run.threads=2", "engine.batch.max_running=2", dropped)
        stopped("rl 3/6", "run.threads=1", 'engine.kind="remote"', f"engine.urls=['{url}']")
        stopped("rl 4/6", "run.threads=2", "cluster.kind=local", "cluster.engines=2", "cluster.engine_threads=1")
    assert main(command(given, "moved", "run.threads=2", "engine.kv.share_prefixes=false")) == 0
    capsys.readouterr()
    assert main(["diff", str(runs / "still"), str(runs / "moved")]) == 0
    out = capsys.readouterr().out
    assert "settings that differ: engine.kv.share_prefixes (True -> False), run.threads (1 -> 2)" in out
    events = [json.loads(line).get("event", "") for line in (runs / "moved/metrics.jsonl").read_text().splitlines()]
    moves = [event for event in events if "another layout" in event]
    assert len(moves) == 3 and "engine.kind ('native' -> 'remote')" in moves[0] and "run.threads (1 -> 2)" in moves[1]
    assert "cluster.kind ('local' -> 'inline')" in moves[2]
    recorded = load_recorded(runs / "moved/config.toml")
    assert (recorded.run.threads, recorded.engine.kind, recorded.engine.urls) == (2, "native", ())


@pytest.mark.slow
def test_a_run_on_a_served_engine_is_replayed_without_it(
    given: Path, checkpoint: Path, served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    with served(str(checkpoint)) as (_, url):
        assert main(command(given, "remote", 'engine.kind="remote"', f"engine.urls=['{url}']", "rl.steps=2")) == 0
    folder = given.parent / "runs/remote"
    for words in ([], ["rl/0/1"], ["--threads", "2"]):
        capsys.readouterr()
        assert main(["replay", str(folder), *words]) == 0
        assert capsys.readouterr().out.endswith("identical, bit for bit\n")


@pytest.mark.parametrize(
    ("begun", "now", "refused"),
    [
        ('models.policy.numerics="fast"', "run.threads=2", 'models.policy.numerics is "fast"'),
        ("run.threads=1", 'engine.kind="vllm"', 'engine.kind is "vllm"'),
        ('engine.kind="vllm"', "run.threads=2", 'engine.kind is "vllm"'),
        ("engine.kv.tokens=512", "engine.kv.tokens=400", "engine.kv.tokens (512 -> 400)"),
        ('engine.update.live_kv="keep"', 'engine.update.live_kv="recompute"', "engine.update.live_kv"),
    ],
)
def test_what_would_change_bits_is_refused(
    given: Path, capsys: pytest.CaptureFixture[str], begun: str, now: str, refused: str
) -> None:
    from sparring.recipe.load import load
    from sparring.recipe.run_config import dump, resolve

    folder = given.parent / "runs/tiny"
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(dump(resolve(load(given, [begun]))))
    assert main(["check", str(given), "--set", begun, "--set", now]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"{folder}: expected the config that this run was started with") and refused in error


def test_patience_with_an_update_and_addresses_may_change_on_vllm(given: Path) -> None:
    from sparring.launch.resume import compare
    from sparring.recipe.load import load
    from sparring.recipe.run_config import dump, resolve

    folder = given.parent / "runs/tiny"
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(dump(resolve(load(given, ['engine.kind="vllm"']))))
    for changed in (
        ("engine.update.timeout_s=9", "engine.update.retries=1"),
        ("engine.urls=['unix:one', 'unix:other']", "engine.silent_s=3"),
    ):
        assert compare(folder, resolve(load(given, ['engine.kind="vllm"', *changed])), None) == []
