"""A run of another version is refused by every command by the number of its record, in one sentence."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import pytest

import sparring
from sparring.cli.main import main
from sparring.errors import BadInput
from sparring.recipe.load import load

COMMANDS = {
    "run": "run {recipe}",
    "check": "check {recipe}",
    "replay": "replay {run}",
    "replay of a rollout": "replay {run} rl/0/0",
    "report": "report {run}",
    "curves": "report --csv {run}",
    "live report": "report --serve {run}",
    "show": "show {run}",
    "eval": "eval {recipe} {run} --name other",
    "eval of a step": "eval {recipe} {run}/rl/last --name other",
    "diff": "diff {run} {run}",
    "export": "export {run} {run}-out",
    "chat": "chat {run}",
    "serve": "serve {run}",
}


def files_in(folder: Path) -> Mapping[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("killed", [False, True])
def test_each_command_refuses_it_and_changes_nothing(
    given: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], killed: bool
) -> None:
    """A run that was killed has its version in the write-ahead log alone, and a recipe with keys of then."""
    steps = ["--set", "rl.steps=1", "--set", 'run.stages=["rl"]', "--set", "rl.train={save_every=1}"]
    assert main(["run", str(given), *steps]) == 0
    run, store = tmp_path / "runs/tiny", tmp_path / "runs/tiny/store.sqlite"
    with closing(sqlite3.connect(store)) as database:
        database.execute("PRAGMA wal_autocheckpoint = 0")
        database.execute("PRAGMA user_version = 7")
        if killed:
            for part in ("store.sqlite", "store.sqlite-wal"):
                shutil.copy(run / part, tmp_path / part)
    if killed:
        for part in ("store.sqlite", "store.sqlite-wal"):
            os.replace(tmp_path / part, run / part)
        config = run / "config.toml"
        config.write_text(config.read_text().replace("[rollout]\n", "[rollout]\ntemperature = 0.5\n"))
    before = files_in(run)
    said = (
        f"{store}: expected the record of a run, of version 1, got one of version 7; go on with the Sparring that wrote "
        "it (before-0.1.0 in CHANGELOG.md), or begin another run (--name)\n"
    )
    capsys.readouterr()
    for name, command in COMMANDS.items():
        assert main(command.format(recipe=given, run=run).split()) == 2, name
        assert capsys.readouterr().err == said, name
    with pytest.raises(BadInput, match="got one of version 7"):
        sparring.run(load(given))
    after = {name: data for name, data in files_in(run).items() if not name.endswith(("-shm", "-wal"))}
    assert after == {name: data for name, data in before.items() if not name.endswith("-wal")}
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["tiny"]
