"""A recipe whose boxes use an image together with an agent program, from the archive to trained weights."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from image_files import SHELL, copy_programs, empty_image, python_image, save_archive

from sparring.store.sqlite import SqliteStore

HERE = Path(__file__).parent
SETTINGS = (
    f"env.name={HERE / 'clerk_world.py'}:Errands",
    f"rollout.harness={HERE / 'clerk.toml'}",
    'run.stages=["sft", "rl"]',
    "rollout.sampling.max_turn_tokens=48",
    "env.limits.max_turns=3",
    "env.limits.max_tokens=120",
    "sft.steps=40",
    "sft.rows_per_step=8",
    "sft.train={learning_rate=1e-2, save_every=0}",
    "rl.steps=2",
    "observe.progress=off",
)


@pytest.fixture
def cache() -> Iterator[Path]:
    """A user's cache that the boxes' user can enter."""
    folder = Path(tempfile.mkdtemp(dir="/var/tmp"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def sparring(cache: Path, *words: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "sparring", *words]
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "OMP_NUM_THREADS": "1"}
    return subprocess.run(line, capture_output=True, text=True, env=environment, timeout=900)


def settings(image: str) -> list[str]:
    return [word for setting in (*SETTINGS, f"env.box.image={image}") for word in ("--set", setting)]


@pytest.mark.full
def test_a_program_trains_in_boxes_of_an_image_and_is_refused_where_it_cannot_run(
    given: Path, cache: Path, tmp_path: Path
) -> None:
    (whole,) = python_image(tmp_path / "whole")
    shell = empty_image(tmp_path / "shell")
    copy_programs(SHELL, shell)
    for name, layer in (("clerks", whole), ("shell", shell)):
        save_archive(layer, tmp_path / f"{name}.tar", ["PATH=/usr/bin", "KIND=clerks"])
        pulled = sparring(cache, "image", "pull", str(tmp_path / f"{name}.tar"), "--as", name)
        assert pulled.returncode == 0, pulled.stderr
    refused = sparring(cache, "check", str(given), *settings("shell"))
    assert refused.returncode == 2
    assert "box.image: expected an image in which the program of" in refused.stderr
    assert "`python3 --version` ended with status 127: python3: No such file or directory" in refused.stderr
    done = sparring(cache, "run", str(given), *settings("clerks"))
    assert done.returncode == 0, done.stderr
    checked = sparring(cache, "check", str(given), *settings("clerks"))
    assert "harness: its program starts in 1 of 1 images of the first tasks" in checked.stdout
    with closing(SqliteStore(given.parent / "runs/tiny/store.sqlite", read_only=True)) as store:
        rollouts = [rollout for group in store.groups(stage="rl") for rollout in group.rollouts]
        differences = [values["logprob_max_abs_diff"] for _, values in store.metrics("rl")]
    assert rollouts and all(rollout.trajectories[0].segments for rollout in rollouts)
    assert {rollout.task.box.image for rollout in rollouts if rollout.task.box is not None} == {"clerks"}
    assert differences == [0.0, 0.0], "what was sampled through the image is trained bit by bit"
