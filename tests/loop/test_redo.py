"""A run that goes on on a machine which computes other bits: it is told how to, and samples again what it cannot
repeat."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from stored import sql

from sparring.cli.main import main
from sparring.store.codec import decode, encode
from sparring.store.sqlite import SqliteStore

STEPS, EVERY, GROUPS = 4, 2, 2
WORDS = ('run.stages=["rl"]', f"rl.steps={STEPS}", f"rl.train.save_every={EVERY}", "observe.progress=off")
AGAIN = "or sample the steps behind the last checkpoint again: --set run.redo=sample"


def command(recipe: Path, *more: str) -> list[str]:
    return ["run", str(recipe), *(word for setting in (*WORDS, *more) for word in ("--set", setting))]


def checksums(folder: Path) -> list[tuple[str, str]]:
    with closing(SqliteStore(folder / "store.sqlite", read_only=True)) as store:
        return [(entry.name, entry.data["checksum"]) for _, entry in store.entries("rl", kinds=["published"])]


def stop_behind_the_checkpoint(folder: Path, *, other_bits: bool) -> None:
    """The folder as a kill leaves it behind the last step's update, with the checkpoint of step 2. `other_bits`: another
    processor had computed step 3."""
    shutil.rmtree(folder / "rl/model")
    with closing(sqlite3.connect(folder / "store.sqlite")) as store, store:
        store.execute("DELETE FROM pairs WHERE key = 'stage/rl'")
        store.execute("DELETE FROM checkpoints WHERE step > ?", (EVERY,))
        if other_bits:
            where = "WHERE kind = 'published' AND name = 'rl@3'"
            ((data,),) = store.execute(f"SELECT data FROM log {where}").fetchall()
            changed = encode({**decode(data, dict), "checksum": "of another processor"})
            store.execute(f"UPDATE log SET data = ? {where}", (changed,))
    shutil.rmtree(folder / f"rl/checkpoints/step-{STEPS:06d}")


def check_whole(folder: Path) -> None:
    """Nothing is lost and nothing doubled."""
    with closing(SqliteStore(folder / "store.sqlite", read_only=True)) as store:
        assert [group.index for group in store.groups(stage="rl")] == list(range(STEPS * GROUPS))
        assert [step for step, _ in store.metrics("rl")] == list(range(1, STEPS + 1))
        admitted = [entry.name for _, entry in store.entries("rl", kinds=["admitted"])]
        assert admitted == [f"rl/{index}" for index in range(STEPS * GROUPS)]
        trained = [entry.data["groups"] for _, entry in store.entries("rl", kinds=["trained"])]
        assert trained == [[f"rl/{GROUPS * step + n}" for n in range(GROUPS)] for step in range(STEPS)]
        assert not sql(folder, "SELECT rollout FROM turns")
    assert [name for name, _ in checksums(folder)] == [f"rl@{step}" for step in range(1, STEPS + 1)]


def test_other_bits_end_the_run_which_goes_on_by_sampling_again(
    given: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, lag = tmp_path / "runs/tiny", "rollout.max_lag=2"
    assert main(command(given, lag)) == 0
    before = checksums(folder)
    stop_behind_the_checkpoint(folder, other_bits=True)
    capsys.readouterr()
    assert main(command(given, lag)) == 1
    error = capsys.readouterr().err
    assert "rl step 3: expected the weights that were published before the stop, checksum of another" in error
    assert error.strip().endswith(AGAIN)
    assert main(command(given, lag, "run.redo=sample")) == 0
    check_whole(folder)
    assert checksums(folder)[:EVERY] == before[:EVERY]
    assert "steps 3 to 4 are sampled and trained again: run.redo is sample" in (folder / "metrics.jsonl").read_text()
    [(dropped,)] = sql(folder, "SELECT count(*) FROM groups WHERE superseded = 1")
    assert dropped == (STEPS - EVERY) * GROUPS, "they stay in the file"


@pytest.mark.slow
def test_a_run_changes_its_processor(given: Path, tmp_path: Path) -> None:
    """The portable kernels compute other bits than those of this processor."""
    folder = tmp_path / "runs/tiny"

    def sparring(*more: str, **environment: str) -> subprocess.CompletedProcess[str]:
        words = [sys.executable, "-m", "sparring.cli.main", *command(given, *more)]
        env = {**os.environ, **environment}
        return subprocess.run(words, capture_output=True, text=True, env=env, timeout=300)

    assert sparring().returncode == 0
    before = checksums(folder)
    stop_behind_the_checkpoint(folder, other_bits=False)
    portable = {"SPARRING_KERNELS": "off"}
    refused = sparring(**portable)
    assert refused.returncode == 1 and refused.stderr.strip().endswith(AGAIN), refused.stderr
    done = sparring("run.redo=sample", **portable)
    assert done.returncode == 0, done.stderr
    check_whole(folder)
    after = checksums(folder)
    assert after[:EVERY] == before[:EVERY] and after[EVERY] != before[EVERY]
