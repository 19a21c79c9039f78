"""Address and keys of a run for programs elsewhere, in its folder."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from sparring.errors import BadInput
from sparring.launch.run_server import KEYS, answered_outside
from sparring.recipe.load import from_data

BASE = {"run": {"name": "a"}, "models": {"policy": {"path": "."}}, "env": {"name": "reverse"}}
CONFIG = from_data({**BASE, "rollout": {"harness": "workers"}}, "r")


def written(folder: Path, keys_of: Path | None = None) -> dict[str, Any]:
    """What stands in the file while programs elsewhere are answered."""
    told: list[str] = []

    async def main() -> dict[str, Any]:
        async with answered_outside(CONFIG, folder, lambda *words: told.append(": ".join(words)), keys_of=keys_of):
            assert (folder / KEYS).stat().st_mode & 0o777 == 0o600
            return json.loads((folder / KEYS).read_text())

    file = asyncio.run(main())
    assert told == [f"run: programs elsewhere: {file['url']}, keys in {folder / KEYS}"]
    return file


def keys(file: dict[str, Any]) -> tuple[str, str]:
    return file["worker_key"], file["reward_key"]


def test_evaluations_have_keys_of_their_own_until_their_run_has_some(tmp_path: Path) -> None:
    run, evaluations = tmp_path / "run", tmp_path / "run/evaluations"
    own = keys(written(evaluations, run))
    assert keys(written(evaluations, run)) == own and not (run / KEYS).exists()
    of_run = keys(written(run))
    assert len({*own, *of_run}) == 4
    assert keys(written(evaluations, run)) == of_run == keys(written(run))


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(BadInput, match="run/evaluations: expected a folder"):
        written(tmp_path / "run/evaluations")
