"""A whole run whose rollouts are held to a text: trained exactly (law 2), replayed to the bit (law 8), refused by name (law 10)."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from sparring.cli.main import main
from sparring.store.sqlite import SqliteStore
from sparring.types import Segment

PATTERN = "[0-9]{2,4}( or [a-z]{1,3})?"


def words(settings: tuple[str, ...]) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]


def trained(recipe: Path, *settings: str) -> tuple[Path, list[Segment]]:
    """The folder of a run of two exact steps, and what was sampled for them."""
    assert main(["run", str(recipe), *words(('run.stages=["rl"]', "rl.steps=2", "rl.train.save_every=1", *settings))]) == 0
    folder = recipe.parent / "runs" / "tiny"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line["values"] for line in lines if line["stage"] == "rl" and "step" in line]
    assert len(steps) == 2 and all(values["tokens_trained"] > 0 for values in steps)
    assert [(values["logprob_max_abs_diff"], values["ratio"]) for values in steps] == [(0.0, 1.0)] * 2
    store = SqliteStore(folder / "store.sqlite", read_only=True)
    rollouts = [rollout for group in store.groups(stage="rl") for rollout in group.rollouts]
    store.close()
    return folder, [s for rollout in rollouts for trajectory in rollout.trajectories for s in trajectory.segments if s.model]


def replayed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rollout in ("rl/0/0", "rl/3/2"):
        capsys.readouterr()
        assert main(["replay", str(folder), rollout]) == 0
        assert capsys.readouterr().out.endswith("identical, bit for bit\n")


@pytest.mark.extra
def test_a_run_under_a_regular_expression(given: Path, capsys: pytest.CaptureFixture[str]) -> None:
    constraint = f'rollout.constraint={{kind="regex", source="{PATTERN}"}}'
    folder, turns = trained(given, constraint, "rollout.top_p=0.9")
    ended = [turn for turn in turns if turn.tokens[-1] in turn.sampling.stop]
    assert len(ended) > len(turns) / 2 and all(re.fullmatch(PATTERN, turn.message.content) for turn in ended)
    assert all(turn.sampling.constraint.source == PATTERN and turn.kept is not None for turn in turns)
    replayed(folder, capsys)
