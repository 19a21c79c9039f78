"""docs/from-trl.md: every key of TRL's that the table names is one of GRPOConfig or of GRPOTrainer, in TRL itself."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.trl
ROOT = Path(__file__).parents[2]
NAMES = """
import dataclasses, inspect, json
from trl import GRPOConfig, GRPOTrainer
fields = [field.name for field in dataclasses.fields(GRPOConfig)]
print(json.dumps([*fields, *inspect.signature(GRPOTrainer.__init__).parameters]))
"""


def keys(page: str) -> list[str]:
    """Return the keys in the first column of every row: `name`, `name=...` or `GRPOTrainer(name=...)`."""
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    quoted = [key.removeprefix("GRPOTrainer(") for row in rows for key in re.findall(r"`([^`]+)`", row)]
    return [match.group() for key in quoted if (match := re.match(r"\w+", key)) is not None]


def test_every_key_of_trl_is_one_of_trl() -> None:
    command = [str(ROOT / ".venv-trl/bin/python"), "-c", NAMES]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
    answer = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    names = set(json.loads(answer.stdout.splitlines()[-1]))
    page = keys((ROOT / "docs/from-trl.md").read_text(encoding="utf-8"))
    assert len(page) > 40 and [key for key in page if key not in names] == []
    assert "no_such_key" not in names
