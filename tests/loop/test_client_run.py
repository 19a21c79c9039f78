"""A run whose agent is an unmodified client of the vendor's: trained token for token, in every stage."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from sparring.cli.main import main
from sparring.store.sqlite import SqliteStore
from sparring.types import Rollout

CLIENT = Path(__file__).parent / "client_world.py"


@pytest.fixture
def run(given: Path) -> Path:
    """The folder of the tiny run with the client as its harness."""
    settings = (
        'run.stages=["rl","eval"]',
        f"rollout.harness={CLIENT}:agent",
        "env.limits.max_turns=3",
        "env.limits.max_tokens=60",
        "rl.steps=2",
        "observe.lines_every_s=0",
    )
    assert main(["run", str(given), *(word for setting in settings for word in ("--set", setting))]) == 0
    return given.parent / "runs/tiny"


def rollouts(run: Path) -> Iterator[Rollout]:
    with closing(SqliteStore(run / "store.sqlite", read_only=True)) as store:
        for group in store.groups(stage="rl"):
            assert not group.failed
            yield from group.rollouts


def test_what_the_client_gets_is_what_is_trained(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rollout in rollouts(run):
        (trajectory,) = rollout.trajectories
        assert [s.parent for s in trajectory.segments] == [None, *range(len(trajectory.segments) - 1)], "one line"
        turns = [s for s in trajectory.segments if s.model is not None]
        assert rollout.outcome.kind in ("completed", "truncated")
        assert (rollout.outcome.kind == "truncated") == (turns[-1].finish_reason == "length")
    with closing(SqliteStore(run / "store.sqlite", read_only=True)) as store:
        assert [values["logprob_max_abs_diff"] for _, values in store.metrics("rl")] == [0.0] * 2
    capsys.readouterr()
    assert main(["replay", str(run)]) == 0
    assert "identical, bit for bit" in capsys.readouterr().out
