"""A whole run whose rollouts are answered by a gateway in a process of its own, which is killed in mid-run."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from forked import Forked
from forked import finished as ended
from restarted_gateway import KILL_AT, PROCESS
from stored import sql

from sparring.store.sqlite import SqliteStore

HERE = Path(__file__).parent
KILLS = (5, 40, 1)
"""Numbers of streamed events, of each process."""


def command(recipe: Path, name: str, *more: str) -> list[str]:
    settings = (
        f"run.name={name}",
        'run.stages=["rl"]',
        f"rollout.harness={HERE / 'restarted_gateway.py'}:agent",
        "rl.steps=6",
        "observe.lines_every_s=0",
        *more,
    )
    return ["run", str(recipe), *(word for setting in settings for word in ("--set", setting))]


def outcome(folder: Path) -> tuple[Any, Any, Any]:
    """Return what a run sampled, what it earned, and the checksums of its weights. Left out are times, what the engine
    had in its cache, and notes of delivery: that a reply was delivered, nobody needs to say."""
    with closing(SqliteStore(folder / "store.sqlite", read_only=True)) as store:
        assert not sql(folder, "SELECT rollout FROM turns"), "every turn is in a group"
        groups = list(store.groups(stage="rl"))
        trajectories = [t for group in groups for rollout in group.rollouts for t in rollout.trajectories]
        assert not [s for t in trajectories for s in t.segments if s.delivered is False]
        sampled = [
            (t.id, [replace(s, delivered=None) for s in t.segments], replace(t.usage, cached_tokens=0), t.outcome)
            for t in trajectories
        ]
        weights = {entry.name: entry.data["checksum"] for _, entry in store.entries("rl", kinds=["published"])}
        return msgspec.to_builtins(sampled), [score.reward for g in groups for score in g.scores], weights


class Gateway:
    """`sparring gateway` of a run, at a port of its own; its process stands in a file."""

    def __init__(self, folder: Path, file: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.words = ["gateway", str(folder), "--port", str(self.port)]
        self.file = file
        file.write_text("")

    def start(self) -> subprocess.Popen[str]:
        words = [sys.executable, "-m", "sparring.cli.main", *self.words]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("gateway of "), line
        written = self.file.with_suffix(".new")
        written.write_text(str(process.pid))
        written.replace(self.file)
        return process


@pytest.mark.slow
def test_a_run_whose_gateway_is_killed_is_one_without_a_gateway(
    given: Path, tmp_path: Path, wait_for: Callable[[subprocess.Popen[str], str], None]
) -> None:
    done = ended(command(given, "inside"))
    assert done.returncode == 0, done.stdout + done.stderr
    gateway = Gateway(given.parent / "runs/outside", tmp_path / "process")
    os.environ |= {PROCESS: str(gateway.file), KILL_AT: " ".join(map(str, KILLS))}
    try:
        words = command(given, "outside", f'rollout.gateway.url="http://127.0.0.1:{gateway.port}"')
        with Forked(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as run:
            wait_for(run, "gateway: ")
            for _ in KILLS:
                assert gateway.start().wait(timeout=120) < 0
            last = gateway.start()
            output, _ = run.communicate()
            last.kill()
            last.wait()
    finally:
        del os.environ[PROCESS], os.environ[KILL_AT]
    assert run.returncode == 0, output
    folder = given.parent / "runs"
    assert outcome(folder / "outside") == outcome(folder / "inside")
