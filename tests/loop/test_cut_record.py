"""A run whose record was cut at any byte goes on from what is durable, or is refused: nothing is lost in silence."""

from __future__ import annotations

import random
import shutil
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from test_async_resume import WRITES, Killed, Ledger, Life, MortalStore, lives, num_commits

from sparring.cli.main import main
from sparring.errors import StoreError
from sparring.store.sqlite import SqliteStore
from sparring.testing.clock import run_virtual

__all__ = ["num_commits"]


@pytest.mark.parametrize("seed", range(4))
def test_an_asynchronous_run_goes_on_from_a_log_cut_anywhere(tmp_path: Path, num_commits: int, seed: int) -> None:
    """The lives that follow train every step once and sample no turn again that is still there."""
    chance = random.Random(seed)
    (tmp_path / "first").mkdir()
    with closing(SqliteStore(tmp_path / "first/store.sqlite")) as store:
        with suppress(Killed):
            commits = chance.randrange(num_commits // 2, num_commits)
            run_virtual(Life(MortalStore(store, commits), tmp_path, Ledger(), 0).run())
        (tmp_path / "cut").mkdir()
        for name in ("store.sqlite", "store.sqlite-wal"):
            shutil.copy(tmp_path / "first" / name, tmp_path / "cut" / name)
    log = tmp_path / "cut/store.sqlite-wal"
    log.write_bytes(log.read_bytes()[: chance.randrange(log.stat().st_size)])
    ledger = Ledger()
    with closing(SqliteStore(tmp_path / "cut/store.sqlite")) as store:
        for number, (_, entry) in enumerate(store.entries("rl", kinds=["trained"])):
            ledger.trained[number + 1] = list(entry.data["groups"])
    lives(tmp_path / "cut", ledger, [chance.randrange(num_commits // 2)])


@pytest.mark.parametrize("left", [0, 1, 50])
def test_weights_without_their_record_are_no_fresh_run(
    given: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], left: int
) -> None:
    folder = tmp_path / "runs/tiny"
    (folder / "sft/checkpoints/step-000002").mkdir(parents=True)
    (folder / "store.sqlite").write_bytes(b"SQLite format 3\0"[:left].ljust(left, b"\0"))
    for _ in range(2):  # and not only the first time
        assert main(["run", str(given)]) == (2 if left == 0 else 1)
        error = capsys.readouterr().err
        assert f"{folder}/store.sqlite: expected " in error and "restore it from a copy, or " in error
    if left == 0:
        (folder / "store.sqlite").unlink()
        assert main(["run", str(given)]) == 2
        expected = f"the record of the run that wrote {folder}/sft/checkpoints/step-000002, got an empty one; "
        assert expected in capsys.readouterr().err


def test_a_stage_whose_weights_are_gone_is_named(
    given: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "runs/tiny"
    with closing(SqliteStore(folder / "store.sqlite")) as store:
        store.put("stage/init", {})
        store.put("stage/sft", {"rows": 1})
    assert main(["run", str(given)]) == 2
    expected = f"stage rl: expected the weights that stage sft wrote, got no {folder}/sft/model; restore it from a copy"
    assert expected in capsys.readouterr().err


class FullStore(MortalStore):
    """A store whose disk is full at its n-th commit, and from then on."""

    def __getattr__(self, name: str) -> Any:
        method = super().__getattr__(name)

        def write(*arguments: Any, **named: Any) -> Any:
            try:
                return method(*arguments, **named)
            except Killed:
                self.dead = False
                raise StoreError("database or disk is full") from None

        return write if name in WRITES else method


@pytest.mark.parametrize("seed", range(6))
def test_a_disk_that_fills_at_any_commit_of_the_log_ends_the_run_which_goes_on(
    tmp_path: Path, num_commits: int, seed: int
) -> None:
    """Admissions, turns, observations, outcomes, orders and checksums alike: no write is left out in silence."""
    commits = random.Random(seed).randrange(num_commits * (seed + 1) // 6)
    with closing(SqliteStore(tmp_path / "store.sqlite")) as store:
        full = FullStore(store, commits)
        ledger = Ledger()
        with pytest.raises((StoreError, ExceptionGroup)) as error:
            run_virtual(Life(full, tmp_path, ledger, 0).run())
        assert "disk is full" in str(error.value) and full.commits == commits
    lives(tmp_path, ledger, [])
