"""A run whose engine is another process, `sparring serve`: the same weights, bit by bit, as with an engine of its
own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from sparring.cli.main import main
from sparring.weights.shared_memory import FOLDER, PREFIX


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
