"""A real asynchronous run, killed -9 at random moments, again and again: the run itself compares the weights of every
step that it trains again with those that were lost."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from stored import sql

from sparring.store.sqlite import SqliteStore

WORLD = Path(__file__).parent / "tiny_world.py:Slow"
STEPS, GROUPS, MAX_LAG = 400, 2, 2


def command(recipe: Path) -> list[str]:
    settings = (
        f"env.name={WORLD}",
        'run.stages=["rl"]',
        f"rl.steps={STEPS}",
        f"rl.groups_per_step={GROUPS}",
        "rl.train.save_every=3",
        "rl.pools.keep_easy=0.3",
        f"rollout.max_lag={MAX_LAG}",
        "observe.lines_every_s=0",
    )
    words = [word for setting in settings for word in ("--set", setting)]
    return [sys.executable, "-m", "sparring.cli.main", "run", str(recipe), *words]


def checksums(folder: Path) -> dict[str, str]:
    with closing(SqliteStore(folder / "store.sqlite", read_only=True)) as store:
        return {entry.name: entry.data["checksum"] for _, entry in store.entries("rl", kinds=["published"])}


@pytest.mark.kills
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_twenty_kills_lose_and_double_nothing(given: Path, tmp_path: Path, seed: int) -> None:
    chance, folder = random.Random(seed), tmp_path / "runs/tiny"
    published: dict[str, str] = {}
    kills = 0
    for _ in range(20):
        with subprocess.Popen(command(given), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
            assert run.stdout is not None
            lines = chance.randrange(18, 26)  # some behind the checks, so among the first steps or in their redo
            text = [line for line, _ in zip(run.stdout, range(lines), strict=False)]
            try:
                run.wait(chance.random() * 0.2)
            except subprocess.TimeoutExpired:
                run.kill()
                kills += 1
            run.communicate()
        assert run.returncode in (0, -signal.SIGKILL), "".join(text)
        if (folder / "store.sqlite").is_file():
            found = checksums(folder)
            assert published.items() <= found.items(), "the weights of every step are those before the kill"
            published = found
    done = subprocess.run(command(given), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    print(f"{kills} kills, {len(published)} steps published before the last start")
    assert kills == 20 and len(checksums(folder)) == STEPS
    with closing(SqliteStore(folder / "store.sqlite", read_only=True)) as store:
        groups = list(store.groups(stage="rl"))
        assert [group.index for group in groups] == list(range(STEPS * GROUPS))
        assert all(0 <= group.index // GROUPS - group.version <= MAX_LAG for group in groups)
        trained = [entry.data["groups"] for _, entry in store.entries("rl", kinds=["trained"])]
        assert trained == [[f"rl/{GROUPS * step + n}" for n in range(GROUPS)] for step in range(STEPS)]
        assert [step for step, _ in store.metrics("rl")] == list(range(1, STEPS + 1))
        assert not sql(folder, "SELECT rollout FROM turns"), "every turn is in a group"
