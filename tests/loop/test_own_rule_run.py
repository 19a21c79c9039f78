"""Runs by rules in the user's own files: their bits, their ranks, their resume."""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path

import pytest

from sparring.cli.main import main

RULES = """
from sparring.algo.credit.grpo import Grpo
from sparring.algo.own_loss import BaseLoss


class Mine(Grpo, frozen=True, kw_only=True):
    pass


class Clipped(BaseLoss, frozen=True, kw_only=True):
    low: float = 0.2
    high: float = 0.28

    def __call__(self, tokens):
        import late

        ratio = tokens.log_ratio.exp()
        clipped = ratio.clamp(1.0 - self.low, 1.0 + self.high)
        return -(ratio * tokens.advantages).minimum(clipped * tokens.advantages)
"""


def sparring(recipe: Path, name: str, *settings: str) -> int:
    every = (f"run.name={name}", 'run.stages=["rl"]', "rl.steps=3", "observe.progress=off", *settings)
    return main(["run", str(recipe), *(word for setting in every for word in ("--set", setting))])


def weights(recipe: Path, name: str) -> str:
    return hashlib.sha256((recipe.parent / "runs" / name / "rl/model/model.safetensors").read_bytes()).hexdigest()


@pytest.mark.parametrize(
    "layout", [(), pytest.param(("cluster.kind=local", "cluster.ranks=2"), marks=pytest.mark.full, id="ranks")]
)
def test_a_rule_that_is_a_built_in_one_gives_its_bits(
    given: Path, capsys: pytest.CaptureFixture[str], layout: tuple[str, ...]
) -> None:
    file = given.parent / "rules.py"
    file.write_text(RULES)
    file.with_name("late.py").touch()
    own = (f"algo.credit={file}:Mine", f"algo.loss={file}:Clipped", *layout)
    assert sparring(given, "own", *own) == sparring(given, "built-in") == 0
    assert not [path for path in Path(tempfile.gettempdir()).glob(".scratch-*/late.py")], "ranks leave no files"
    assert weights(given, "own") == weights(given, "built-in")
    file.write_text(RULES + "# another text\n")
    capsys.readouterr()
    assert sparring(given, "own", *own) == 2
    assert "algo.credit.digest" in capsys.readouterr().err
    file.unlink()
    assert main(["report", str(given.parent / "runs/own")]) == 0
