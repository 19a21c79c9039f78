"""A whole run whose rollouts are answered by a gateway in a process of its own: either process is killed in mid-run."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import msgspec
import pytest
from forked import Forked
from forked import finished as ended
from restarted_gateway import FATES, PROCESS
from stored import sql

from sparring.store.sqlite import SqliteStore

HERE = Path(__file__).parent
KILLS = ("gateway 5", "gateway 40", "gateway 1")
"""Who is killed, and behind how many streamed events since the kill before."""
MANY = tuple(f"{('gateway', 'run')[place % 2]} {1 + place % 3}" for place in range(50))


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
        self.file, self.kills = file, 0
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

    def guard(self) -> None:
        """Start it again whenever it is killed, until it ends with the run."""
        while self.start().wait() < 0:
            self.kills += 1


@pytest.mark.slow
@pytest.mark.parametrize("fates", [KILLS, pytest.param(MANY, marks=pytest.mark.kills)])
def test_a_run_whose_gateway_or_process_is_killed_is_one_without_a_gateway(
    given: Path, tmp_path: Path, wait_for: Callable[[subprocess.Popen[str], str], None], fates: tuple[str, ...]
) -> None:
    """The gateway is started again at its address, and the run is resumed; what is left of the two serves on."""
    done = ended(command(given, "inside"))
    assert done.returncode == 0, done.stdout + done.stderr
    gateway, file = Gateway(given.parent / "runs/outside", tmp_path / "process"), tmp_path / "fates"
    file.write_text("\n".join(fates))
    words = command(given, "outside", f'rollout.gateway.url="http://127.0.0.1:{gateway.port}"')
    ends: list[int] = []
    os.environ |= {PROCESS: str(gateway.file), FATES: str(file)}
    try:
        guarding = Thread(target=gateway.guard, daemon=True)
        while not ends or ends[-1] == -signal.SIGKILL:
            with Forked(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as run:
                wait_for(run, "gateway: ")
                if not ends:
                    guarding.start()
                output, _ = run.communicate()
                ends.append(run.returncode)
    finally:
        del os.environ[PROCESS], os.environ[FATES]
    assert ends[-1] == 0, output
    guarding.join()
    assert file.read_text() == "", "all were killed"
    kills = tuple(sum(fate.startswith(who) for fate in fates) for who in ("run", "gateway"))
    assert (len(ends) - 1, gateway.kills) == kills
    folder = given.parent / "runs"
    assert outcome(folder / "outside") == outcome(folder / "inside")
