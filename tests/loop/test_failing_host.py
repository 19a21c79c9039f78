"""A tool whose host fails at 15 % of calls, through the real stages: its failures are no rewards. The whole proof, over
five seeds, is benchmarks/failures.py."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_host_that_fails_alone_is_not_trained_on_and_under_the_old_rules_it_is(tmp_path: Path) -> None:
    """Of four thousand rewards some four are fake, and not one in ten thousand such runs has sixteen. Under the old
    rules hundreds are, and the policy leaves its tool alone."""
    command = [sys.executable, str(ROOT / "benchmarks/failures.py"), "--seeds", "1", "--steps", "32"]
    done = subprocess.run([*command, "--directory", str(tmp_path)], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    totals = json.loads(done.stdout.splitlines()[-1])["totals"]
    without, new, old = (totals[name] for name in ("no failures", "failures", "failures, old rules"))
    assert without["fakes"] == without["lost"] == 0.0
    assert new["fakes"] <= 0.004 and 0.005 < new["lost"] < 0.05
    assert old["fakes"] >= 0.015
    assert min(without["success"], new["success"]) > old["success"] + 0.04
