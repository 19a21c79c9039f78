"""A run whose engine is another process, `sparring serve`: the same weights, bit by bit, as with an engine of its own.
As on another machine it has a /dev/shm of its own: weights travel over HTTP or through a shared folder, with the same
bits; a server that stands still is noticed in time."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from sparring.cli.main import main
from sparring.engine.adapters.remote import RemoteEngine
from sparring.errors import WeightsError
from sparring.generation import GenerateRequest, Sampling
from sparring.model.load import load
from sparring.weights.http import Http
from sparring.weights.inline import publish
from sparring.weights.links import WeightLinks
from sparring.weights.shared_memory import FOLDER, PREFIX, SharedMemory

ALONE = ["unshare", "--mount", "sh", "-c"]
HIDDEN = (
    """mount -t tmpfs -o size=64m none /dev/shm; if [ -n "$1" ]; then mount -t tmpfs none "$1"; fi; shift; exec "$@" """
)
"""Program that gives another one a /dev/shm of its own, and hides a folder from it, if one is named. Without the right
to that the test fails, with what unshare says."""


@contextmanager
def elsewhere(*arguments: object, hidden: Path | str = "") -> Iterator[str]:
    """Start `sparring serve` as on another machine; yield its address."""
    words = [
        *ALONE,
        f"set -e; {HIDDEN}",
        "alone",
        str(hidden),
        sys.executable,
        "-m",
        "sparring",
        "serve",
        "--port",
        "0",
        "--threads",
        "1",
        *map(str, arguments),
    ]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stderr is not None
            line = process.stdout.readline()
            assert line.startswith("serving "), process.stderr.read()
            yield line.split()[-1]
        finally:
            process.kill()


def finished(recipe: Path, name: str, *settings: str) -> Path:
    sets = [part for setting in settings for part in ("--set", setting)]
    assert main(["run", str(recipe), "--name", name, *sets]) == 0
    assert not list(FOLDER.glob(f"{PREFIX}{os.getpid()}-*"))
    return recipe.parent / "runs" / name


def weights(folder: Path) -> dict[str, bytes]:
    return {name: tensor.tobytes() for name, tensor in load_file(folder / "rl/model/model.safetensors").items()}


Served = Callable[..., AbstractContextManager[tuple[subprocess.Popen[str], str]]]


@pytest.mark.full
def test_a_run_on_a_served_engine_has_the_bits_of_one_on_its_own(
    given: Path, own: Path, checkpoint: Path, served: Served
) -> None:
    stages = 'run.stages=["rl", "eval"]'
    with served(str(checkpoint)) as (server, url):
        remote = finished(given, "remote", stages, "engine.kind=remote", f"engine.urls=['{url}']")
        again = finished(given, "again", stages, "engine.kind=remote", f"engine.urls=['{url}']")
        server.send_signal(signal.SIGINT)
        _, error = server.communicate(timeout=60)
    assert weights(remote) == weights(again) == weights(own)
    summary = json.loads((remote / "summary.json").read_text())
    assert summary["logprob_max_abs_diff"] == 0.0 and summary["tokens_sampled"] > 0
    assert (server.returncode, error) == (130, "\ninterrupted\n")


@pytest.mark.slow
def test_so_has_a_run_that_trains_an_adapter(given: Path, checkpoint: Path, served: Served) -> None:
    settings = ['run.stages=["rl"]', "models.policy.lora.rank=4", "models.policy.lora.alpha=8", "rl.steps=3"]
    own = finished(given, "own", *settings)
    with served(str(checkpoint)) as (_, url):
        remote = [
            finished(given, name, *settings, "engine.kind=remote", f"engine.urls=['{url}']") for name in ("one", "two")
        ]
    trained = [(folder / "rl/model/adapter_model.safetensors").read_bytes() for folder in (own, *remote)]
    assert trained[0] == trained[1] == trained[2]
    assert json.loads((remote[1] / "summary.json").read_text())["logprob_max_abs_diff"] == 0.0


@pytest.mark.slow
def test_a_run_with_an_engine_on_another_machine_has_the_bits_of_one_on_its_own(
    given: Path, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    stages, folder = 'run.stages=["rl"]', f"engine.shared_folder={shared}"
    own = finished(given, "own", stages)
    with elsewhere(checkpoint) as url:
        there = ["engine.kind=remote", f"engine.urls=['{url}']"]
        sets = [part for setting in (stages, *there) for part in ("--set", setting)]
        assert main(["check", str(given), *sets]) == 0
        said = capsys.readouterr().out
        assert f"weights: travelled to {url} by HTTP" in said and "ready to run" in said
        sent = finished(given, "http", stages, *there)
        through = finished(given, "disk", stages, *there, folder)
        assert not list(shared.iterdir())
        missing = f"engine.shared_folder={tmp_path / 'absent'}"
        assert main(["check", str(given), *sets, "--set", missing]) == 2
        assert "engine.shared_folder: expected a folder" in capsys.readouterr().err
    assert weights(sent) == weights(through) == weights(own)
    capsys.readouterr()
    assert main(["diff", str(own), str(sent)]) == 0, capsys.readouterr().out


@pytest.mark.slow
def test_a_server_without_the_models_folder_gets_it_from_the_run(
    given: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stop strings too, which need the tokenizer; and another model later."""
    stages = ('run.stages=["rl", "eval"]', 'rollout.sampling.stop_strings=["7"]')
    own = finished(given, "own", *stages)
    with elsewhere(hidden=checkpoint.parent) as url:
        there = ("engine.kind=remote", f"engine.urls=['{url}']")
        other = ("models.policy.dtype=bfloat16", *there)
        for settings in (there, other, there):
            assert main(["check", str(given), *(part for setting in settings for part in ("--set", setting))]) == 0
            said = capsys.readouterr().out
            assert "takes the run's model" in said
            (travelled,) = [line for line in said.splitlines() if "model: config.json, " in line]
            assert "tokenizer.json, " in travelled and travelled.endswith(f"travelled to {url} by HTTP")
        sent = finished(given, "sent", *stages, *there)
    capsys.readouterr()
    assert main(["diff", str(own), str(sent)]) == 0, capsys.readouterr().out
    assert weights(sent) == weights(own)


@pytest.mark.parametrize("link", [SharedMemory, pytest.param(Http, marks=pytest.mark.slow)])
def test_a_server_that_stands_still_is_a_weights_error_in_time_and_loses_nothing(
    checkpoint: Path, served: Callable[..., AbstractContextManager[tuple[subprocess.Popen[str], str]]], link: type
) -> None:
    """In the middle of a run and at the beginning of one. A push that was not acknowledged is repeated."""
    state, ask = load(checkpoint).state(), GenerateRequest(id="", tokens=(5, 6, 7), sampling=Sampling(max_tokens=2))

    async def scenario(process: subprocess.Popen[str], url: str) -> None:
        engine = RemoteEngine(url, links=WeightLinks([link()]), timeout_s=1.0)
        engine.begin(state)
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(WeightsError, match="unknown until it answers again"):
            await engine.pull(publish("policy", 1, state))
        with pytest.raises(WeightsError, match="unknown until it answers again"):
            engine.begin(state)
        process.send_signal(signal.SIGCONT)
        for _ in range(2):  # the second is acknowledged again
            await engine.pull(publish("policy", 1, state))
        answer = await engine.generate(ask)
        assert set(answer.versions.values) == {1} and engine.version == 1
        await engine.close()

    with served(checkpoint) as (process, url):
        asyncio.run(scenario(process, url))
    assert not list(FOLDER.glob(f"{PREFIX}{os.getpid()}-*"))
