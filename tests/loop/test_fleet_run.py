"""A run whose engine is several servers: the record of a run with an engine of its own, whatever happens to a server."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import pytest
from forked import Forked

from sparring.cli.main import main
from sparring.cluster.inline import InlineCluster
from sparring.engine.config import EngineConfig
from sparring.errors import EngineError
from sparring.generation import GenerateRequest, Sampling
from sparring.model.config import ModelConfig
from sparring.train.config import TrainConfig

STAGES = 'run.stages=["rl", "eval"]'
Served = Callable[..., AbstractContextManager[tuple[subprocess.Popen[str], str]]]


def words(recipe: Path, name: str, *settings: str) -> list[str]:
    return ["run", str(recipe), "--name", name, *(part for setting in settings for part in ("--set", setting))]


def check_same(recipe: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Check that a run has the tokens and the weights of the run `own`."""
    runs = recipe.parent / "runs"
    capsys.readouterr()
    assert main(["diff", str(runs / "own"), str(runs / name)]) == 0, capsys.readouterr().out
    summary = json.loads((runs / name / "summary.json").read_text())
    assert summary["logprob_max_abs_diff"] == 0.0 and summary["tokens_sampled"] > 0


def check_ended(processes: Iterable[int]) -> None:
    """Check that processes, by their ids, have ended, or do so within 30 seconds."""
    for process in processes:
        try:
            descriptor = os.pidfd_open(process)
        except ProcessLookupError:
            continue
        try:
            assert select.select([descriptor], [], [], 30)[0], f"process {process} is still there"
        finally:
            os.close(descriptor)


@pytest.mark.usefixtures("own")
def test_a_run_on_two_servers_has_the_bits_of_one_on_its_own(
    given: Path, checkpoint: Path, served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    with served(str(checkpoint)) as (_, one), served(str(checkpoint)) as (_, other):
        urls = f"engine.urls=['{one}', '{other}']"
        assert main(words(given, "two", STAGES, "engine.kind=remote", urls)) == 0
        assert (
            main(["check", str(given), "--set", "engine.kind=remote", "--set", f"engine.urls=['{one}', '{one}/']"]) == 2
        )
        assert "a server of its own at each address" in capsys.readouterr().err
    check_same(given, "two", capsys)


@pytest.mark.kills
@pytest.mark.slow
def test_twenty_kills_of_two_servers_cost_the_run_nothing(
    given: Path, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are killed in turn, each when the other has come back, at any moment of a step."""
    longer = (STAGES, "rl.steps=1000", "observe.lines_every_s=0.01")
    assert main(words(given, "own", *longer)) == 0
    sockets = [tmp_path / "one.sock", tmp_path / "other.sock"]

    def served(socket: Path) -> Forked:
        server = Forked(("serve", str(checkpoint), "--unix", str(socket), "--threads", "1"), stdout=subprocess.PIPE)
        assert server.stdout is not None and server.stdout.readline().startswith("serving ")
        return server

    servers = [served(socket) for socket in sockets]
    urls = ", ".join(f"'unix:{socket}'" for socket in sockets)
    settings = (*longer, "engine.kind=remote", f"engine.urls=[{urls}]", "engine.silent_s=1")
    command = (sys.executable, "-m", "sparring.cli.main", *words(given, "killed", *settings))
    output, kills = list[str](), 0
    try:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
            assert run.stdout is not None
            ready = True
            for line in run.stdout:
                output.append(line)
                ready |= "gets requests again" in line
                if line.startswith("rl ") and ready and kills < 20:
                    at = kills % 2
                    servers[at].kill()
                    servers[at].wait()
                    servers[at], ready = served(sockets[at]), False
                    kills += 1
            assert run.wait() == 0, "".join(output)
    finally:
        for server in servers:
            server.kill()
            server.wait()
    assert kills == 20, "".join(output)
    check_same(given, "killed", capsys)


@pytest.mark.full
@pytest.mark.parametrize(
    "how",
    [pytest.param(signal.SIGKILL, marks=pytest.mark.slow, id="dies"), pytest.param(signal.SIGSTOP, id="stands still")],
)
def test_a_server_that_is_lost_costs_the_run_nothing(
    how: signal.Signals, given: Path, checkpoint: Path, served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    longer = (STAGES, "rl.steps=30", "observe.lines_every_s=0.01")
    assert main(words(given, "own", *longer)) == 0
    with served(str(checkpoint)) as (lost, one), served(str(checkpoint)) as (_, other):
        settings = (*longer, "engine.kind=remote", f"engine.urls=['{one}', '{other}']", "engine.silent_s=2")
        command = (sys.executable, "-m", "sparring.cli.main", *words(given, "lost", *settings))
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
            assert run.stdout is not None
            output = []
            for line in run.stdout:
                output.append(line)
                if line.startswith("rl ") and lost.poll() is None:
                    os.kill(lost.pid, how)
            assert run.wait() == 0, "".join(output)
        assert f"engine at {one} is left out" in "".join(output)
        if how == signal.SIGSTOP:
            os.kill(lost.pid, signal.SIGCONT)
    check_same(given, "lost", capsys)


def test_a_lone_server_that_stands_still_fails_its_requests_until_it_answers(checkpoint: Path, served: Served) -> None:
    """It is a fleet of one, with the same limit."""
    ask = GenerateRequest(id="a", tokens=(5, 6, 7), sampling=Sampling(max_tokens=4))

    async def scenario(process: subprocess.Popen[str], url: str) -> None:
        config = EngineConfig(kind="remote", urls=(url,), silent_s=1.0)
        models = {"policy": ModelConfig(path=str(checkpoint))}
        cluster = InlineCluster(models=models, train=TrainConfig(), engine=config, device="cpu", threads=1)
        engine = await asyncio.to_thread(partial(cluster.engine, "policy", path=str(checkpoint)))
        before = await engine.generate(ask)
        os.kill(process.pid, signal.SIGSTOP)
        try:
            with pytest.raises(EngineError, match="no answer within 1 s"):
                await engine.generate(ask)
        finally:
            os.kill(process.pid, signal.SIGCONT)
        async with asyncio.timeout(60):
            while engine.metrics["engines_now"] == 0:
                await asyncio.sleep(0)
        assert (await engine.generate(ask)).tokens == before.tokens
        await cluster.close()

    with served(str(checkpoint)) as (process, url):
        asyncio.run(scenario(process, url))
