"""inspect_ai's own checks of a sandbox pass over our boxes; run by make test-inspect."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PYTHON = HERE.parent.parent / ".venv-inspect" / "bin" / "python"
TWO_USERS = {"test_exec_as_user"}
"""Checks that make a second user, which a box does not have."""


@pytest.mark.inspect
def test_all_checks_pass_but_for_a_second_user() -> None:
    line = [str(PYTHON), "-m", "pytest", "-o", "addopts=-q", "--noconftest", "-rA", str(HERE / "checks.py")]
    told = subprocess.run(line, capture_output=True, text=True, check=False).stdout
    ends = [text.split() for text in told.splitlines() if text.startswith(("PASSED ", "FAILED ", "ERROR "))]
    passed = {words[1].rpartition("::")[2] for words in ends if words[0] == "PASSED"}
    others = {words[1].rpartition("::")[2] for words in ends if words[0] != "PASSED"}
    assert (others, len(passed)) == (TWO_USERS, 43), told
