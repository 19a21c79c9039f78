"""A run whose gradients stay infinite or not numbers ends by name, and leaves no such weights."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from sparring.cli.main import main
from sparring.store.sqlite import SqliteStore

WITH_CRITIC = ("algo.preset=ppo", "rl.critic.model=policy", "rl.critic.train.learning_rate=1e30", "rl.critic.clip=0.0")
"""It alone is broken."""


@pytest.mark.parametrize(
    ("stage", "settings", "who"),
    [
        ("rl", ("rl.train.learning_rate=1e30",), "policy"),
        pytest.param("sft", ("sft.train.learning_rate=1e30",), "policy", marks=pytest.mark.slow),
        pytest.param("rl", WITH_CRITIC, "critic", marks=pytest.mark.slow),
    ],
)
def test_it_ends_by_name(
    given: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    stage: str,
    settings: tuple[str, ...],
    who: str,
) -> None:
    words = (f'run.stages=["{stage}"]', f"{stage}.steps=12", f"{stage}.train.save_every=1", *settings)
    command = ["run", str(given), *(word for each in words for word in ("--set", each))]
    assert main(command) == 1
    said = capsys.readouterr()
    assert f"{who} step " in said.err and "expected a finite gradient" in said.err
    assert sum("was not finite" in line for line in said.out.splitlines()) == 1
    folder = tmp_path / "runs/tiny"
    assert not (folder / stage / "model").exists()
    store = SqliteStore(folder / "store.sqlite", read_only=True)
    steps = [metrics for _, metrics in store.metrics(stage)]
    store.close()
    prefix = "" if who == "policy" else f"{who}/"
    assert [step[f"{prefix}updated"] for step in steps[-2:]] == [0.0, 0.0]
    assert all(step[f"{prefix}tokens_trained"] == 0.0 for step in steps[-2:])
    for file in folder.glob(f"{stage}/checkpoints/*/**/model.safetensors"):
        assert all(bool(weight.isfinite().all()) for weight in load_file(file).values())
    assert main(command) == 1, "nothing has changed"
    assert "expected a finite gradient" in capsys.readouterr().err
