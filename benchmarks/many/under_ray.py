"""Runs whose engines Ray places, for benchmarks/scale.py."""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from many.claims import Claims, claim

ROOT = Path(__file__).parents[2]
STEPS, FIRST_STEP = 60, 10
"""Steps of a run, and the first that counts."""
STEP = {
    **{"models.policy.init.hidden_size": 64, "models.policy.init.num_layers": 6, "rl.groups_per_step": 8},
    **{"rollout.group_size": 8, "env.limits.max_tokens": 160, "rollout.sampling.max_turn_tokens": 48},
    **{"run.stages": ["init", "rl"], "rl.steps": STEPS, "observe.lines_every_s": 0.01},
    **{"cluster.engines": 2, "cluster.engine_threads": 1},
}
"""Changes of tests/loop/tiny.toml: the shape of the quickstart."""


def ray(rounds: int) -> Claims:
    """Measure a step under Ray against `local`."""
    from ray.cluster_utils import Cluster

    figures: dict[str, list[dict[str, float]]] = {"local": [], "ray": []}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    try:
        with tempfile.TemporaryDirectory() as folder:
            for number in range(rounds):
                for kind, found in figures.items():
                    own = {"cluster.kind": kind, "cluster.address": cluster.address, "run.directory": folder}
                    found.append(stepped(f"{kind}-{number}", {**STEP, **own}, folder))
    finally:
        cluster.shutdown()
    medians = {
        kind: {name: statistics.median(one[name] for one in found) for name in found[0]}
        for kind, found in figures.items()
    }
    for kind, parts in medians.items():
        print(f"a step, {kind}: " + ", ".join(f"{name} {1e3 * value:.1f} ms" for name, value in parts.items()))
    sums = {kind: parts["controller"] + parts["engines"] for kind, parts in medians.items()}
    return [claim("a step under Ray over local, controller and engines", sums["ray"] / sums["local"], "", 1.05)]


def stepped(name: str, settings: dict[str, Any], folder: str) -> dict[str, float]:
    """Run the recipe; return the processor seconds a step of the controller, of the engines, and of all other processes
    below this one, which are Ray's."""
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    command = [sys.executable, "-m", "sparring.cli.main", "run", "tests/loop/tiny.toml", "--name", name, *words]
    marks: dict[int, dict[str, float]] = {}
    output = []
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
        assert run.stdout is not None
        for line in run.stdout:
            output.append(line)
            if step := re.match(r"rl (\d+)/", line):
                marks[int(step[1])] = processes(run.pid, folder)
    first, last = (edge(at for at in marks if FIRST_STEP <= at < STEPS) for edge in (min, max))
    if run.returncode or first == last:
        raise SystemExit("".join(output))
    return {part: (marks[last][part] - marks[first][part]) / (last - first) for part in marks[last]}


def processes(controller: int, folder: str) -> dict[str, float]:
    """Return the processor seconds so far of a run, of its engines, and of all other processes below this one."""
    parents: dict[int, int] = {}
    sums = {"controller": whole_s(controller), "engines": 0.0, "Ray's own": 0.0}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    for process in parents:
        above = list(ancestors(process, parents))
        if os.getpid() not in above or controller in (process, *above) and not is_engine(process, folder):
            continue
        sums["engines" if is_engine(process, folder) else "Ray's own"] += whole_s(process)
    return sums


def ancestors(process: int, parents: dict[int, int]) -> Iterator[int]:
    """Yield the parent of a process, and its parent."""
    while (process := parents.get(process, 0)) > 1:
        yield process


def is_engine(process: int, folder: str) -> bool:
    """Return whether a process is an engine that a run in a folder started."""
    try:
        command = Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return False
    return b"--until-input-ends" in command and folder.encode() in command


def whole_s(process: int) -> float:
    """Return the processor seconds of another process, of threads that have ended too."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
