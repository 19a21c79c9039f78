"""docs/from-verl.md: every key of verl's that the table names is one of the config that verl itself ships."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = pytest.mark.peers
ROOT = Path(__file__).parents[2]


def keys(page: str) -> list[str]:
    """Return the dotted keys in the first column of every row. `.name` stands for the last part of the key before."""
    named: list[str] = []
    for line in page.splitlines():
        if line.startswith("| `"):
            for key in re.findall(r"`([^`]+)`", line.split("|")[1]):
                beside = f"{named[-1].rpartition('.')[0]}{key}" if key.startswith(".") else key
                named.append(beside.replace("a.r.", "actor_rollout_ref."))
    return named


def holds(config: Any, key: str) -> bool:
    """Return whether a nested config has a dotted key."""
    for part in key.split("."):
        if not isinstance(config, dict) or part not in config:
            return False
        config = config[part]
    return True


def test_every_key_of_verl_is_one_of_verl() -> None:
    (shipped,) = ROOT.glob(".venv-peers/lib/*/site-packages/verl/trainer/config/_generated_ppo_trainer.yaml")
    config = yaml.safe_load(shipped.read_text(encoding="utf-8"))
    page = keys((ROOT / "docs/from-verl.md").read_text(encoding="utf-8"))
    assert len(page) > 45 and [key for key in page if not holds(config, key)] == []
    assert not holds(config, "actor_rollout_ref.actor.no_such_key") and not holds(config, "trainer.logger.none")
