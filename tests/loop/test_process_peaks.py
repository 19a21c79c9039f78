"""What is said of the memory of each process is near what these processes really have, whatever the number of ranks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

RECIPE = Path(__file__).parents[2] / "recipes" / "quickstart.toml"
SHORT = (
    'run.stages=["init","sft","rl"]',
    "run.threads=2",
    "train.token_budget=1024",  # which a step fills
    *("sft.steps=4", "rl.steps=2", "rl.groups_per_step=4"),
    *("observe.lines_every_s=0.01", 'observe.progress="plain"'),
)
KINDS = {b"sparring.cluster.rank_process": "trainer rank", b"serve": "engine process", b"run": "the run's process"}


def peaks(folder: Path) -> dict[int, tuple[str, int]]:
    """Kind and largest resident set in bytes of the processes that have this folder in their environment."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
            environment = (entry / "environ").read_bytes().split(b"\0")
            most = re.search(r"VmHWM:\s+(\d+) kB", (entry / "status").read_text())
        except OSError:
            continue
        kind = next((kind for word, kind in KINDS.items() if word in words), None)
        if kind is not None and most is not None and f"TMPDIR={folder}".encode() in environment:
            found[int(entry.name)] = (kind, int(most[1]) << 10)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "shard"),
    [(1, "optimiser"), (2, "optimiser"), (3, "optimiser"), (2, "parameters"), (3, "parameters")],
)
def test_the_estimate_is_near_the_memory_of_each_process(ranks: int, shard: str, tmp_path: Path) -> None:
    layout = ("cluster.kind=local", f"cluster.ranks={ranks}", f"cluster.shard={shard}")
    settings = (*SHORT, f'run.directory="{tmp_path / "runs"}"', *layout)
    command = [sys.executable, "-m", "sparring.cli.main", "run", str(RECIPE)]
    command += [word for setting in settings for word in ("--set", setting)]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    most, text = dict[int, tuple[str, int]](), ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment) as run:
        assert run.stdout is not None
        for line in run.stdout:
            text += line
            most |= peaks(tmp_path)  # a process's peak never falls, so the last one counts
    assert run.returncode == 0, text
    said = {
        kind: float(gib)
        for gib, kind in re.findall(
            r"([\d.]+) GiB in (?:one |each of \d+ )?(the run's process|trainer rank|engine process)", text
        )
    }
    for kind in KINDS.values() if ranks > 1 else ("engine process", "the run's process"):
        measured = max(size for found, size in most.values() if found == kind) / 2**30
        print(
            f"{ranks} ranks, {shard}, {kind}: said {said[kind]:.2f} GiB, measured {measured:.2f}, {said[kind] / measured:.2f}"
        )
        assert 0.8 * measured <= said[kind] <= 1.3 * measured + 0.01, "which is said in hundredths"
