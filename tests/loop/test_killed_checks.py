"""What is written for a while, before and while a fresh model is made: `kill -9` leaves it in the run's folder alone, and
the next run removes it."""

from __future__ import annotations

import os
import random
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import TINY, WORLD
from forked import Forked, finished
from suite import short_of


@pytest.fixture
def words(tmp_path: Path) -> Iterator[list[str]]:
    """A run that makes a model, whose temporary folder is empty."""
    before, temporary = os.environ.get("TMPDIR"), tmp_path / "temporary"
    temporary.mkdir()
    os.environ["TMPDIR"] = str(temporary)
    settings = [f"run.directory={tmp_path}", f"env.name={WORLD}", 'run.stages=["init"]']
    yield ["run", str(TINY), *(word for setting in settings for word in ("--set", setting))]
    if before is None:
        del os.environ["TMPDIR"]
    else:
        os.environ["TMPDIR"] = before


def killed(words: list[str], at: Callable[[Forked], object]) -> int:
    with Forked(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as run:
        at(run)
        run.kill()
    return run.returncode


def left(folder: Path) -> list[str]:
    """Folders for a while of a run, and all that is in the temporary folder but for torch's cache."""
    temporary = [path for path in (folder / "temporary").iterdir() if not path.name.startswith("torchinductor_")]
    return [path.name for path in (*folder.glob("tiny/.scratch-*"), *temporary)]


def test_the_next_run_removes_what_a_killed_one_left(tmp_path: Path, words: list[str]) -> None:
    def has_begun(run: Forked) -> None:
        while run.poll() is None and not any(tmp_path.glob("tiny/.scratch-*/*")):
            pass

    assert killed(words, has_begun) == -signal.SIGKILL
    [scratch] = left(tmp_path)
    assert scratch.startswith(".scratch-")
    done = finished(words)
    assert done.returncode == 0, done.stderr
    assert left(tmp_path) == [] and (tmp_path / "tiny/init/model/tokenizer.json").is_file()


@pytest.mark.kills
@pytest.mark.parametrize("moment", short_of(range(30), ()))
def test_the_temporary_folder_is_empty_whenever_a_run_is_killed(tmp_path: Path, words: list[str], moment: int) -> None:
    def drawn(run: Forked) -> None:
        try:
            run.wait(random.Random(moment).uniform(0.0, 1.5))
        except subprocess.TimeoutExpired:
            pass

    killed(words, drawn)
    assert [name for name in left(tmp_path) if not name.startswith(".scratch-")] == []
    assert finished(words).returncode == 0 and left(tmp_path) == []
