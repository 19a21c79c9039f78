"""Runs whose engines Ray places, for benchmarks/scale.py."""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from common.figures import ROOT, Claims, claim

FIRST_STEP, WINDOW = 5, 8
"""First step that counts, and steps of the slower run in a measurement."""
START_S = 240.0
"""Seconds that both runs have to come to that step."""
STEP = {
    **{"models.policy.init.hidden_size": 64, "models.policy.init.num_layers": 6, "rl.groups_per_step": 8},
    **{"rollout.group_size": 8, "env.limits.max_tokens": 160, "rollout.sampling.max_turn_tokens": 48},
    **{"run.stages": ["init", "rl"], "rl.steps": 10_000, "observe.lines_every_s": 0.01},
    **{"cluster.engines": 2, "cluster.engine_threads": 1},
}
"""Changes of tests/loop/tiny.toml: the shape of the quickstart, and more steps than are needed."""


class Mark(NamedTuple):
    """End of a step: processor seconds so far of the run's process, of its engines, and of Ray's processes."""

    step: int
    controller: float
    engines: float
    ray: float


class MeasuredRun:
    """Run in a process of its own, which ends with the context of `stack`.

    Attributes:
        marks: ends of its steps so far.
        output: its output so far.
    """

    def __init__(self, kind: str, address: str, folder: str, stack: ExitStack) -> None:
        settings = {**STEP, "cluster.kind": kind, "cluster.address": address, "run.directory": folder}
        words = [word for key, value in settings.items() for word in ("--set", f"{key}={json.dumps(value)}")]
        command = [sys.executable, "-m", "sparring.cli.main", "run", "tests/loop/tiny.toml", "--name", kind, *words]
        self.marks, self.output = list[Mark](), list[str]()
        self._kind = kind
        self._process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        reading = threading.Thread(target=self._read)
        reading.start()
        stack.callback(reading.join)
        stack.callback(self._process.wait)
        stack.callback(self._process.terminate)

    def wait_until(self, step: int, within_s: float) -> Mark:
        """Return the mark of the first step that is not before `step`."""
        deadline = time.monotonic() + within_s
        while not self.marks or self.marks[-1].step < step:
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit("".join(self.output) + f"\n{self._kind}: expected step {step}, got none in time")
            time.sleep(0.01)
        return next(mark for mark in self.marks if mark.step >= step)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.output.append(line)
            if step := re.match(r"rl (\d+)/", line):
                self.marks.append(Mark(int(step[1]), *processes(self._process.pid, self._kind)))


def ray(rounds: int) -> Claims:
    """Measure a step under Ray against `local`. Both runs go on at the same time, so that they have the same
    neighbours."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    costs: dict[str, list[list[float]]] = {"local": [], "ray": []}
    try:
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            runs = {}
            for kind in ("ray", "local"):  # Ray takes longer to start, the more so beside another run
                runs[kind] = MeasuredRun(kind, cluster.address, folder, stack)
                runs[kind].wait_until(FIRST_STEP, START_S)
            marks = {kind: run.marks[-1] for kind, run in runs.items()}
            for _ in range(rounds):
                for kind, run in runs.items():
                    run.wait_until(marks[kind].step + WINDOW, START_S)
                for kind, run in runs.items():
                    begin, end = marks[kind], run.marks[-1]
                    costs[kind].append(
                        [(b - a) / (end.step - begin.step) for a, b in zip(begin[1:], end[1:], strict=True)]
                    )
                    marks[kind] = end
    finally:
        cluster.shutdown()
    for kind, found in costs.items():
        parts = [1e3 * statistics.median(column) for column in zip(*found, strict=True)]
        print(f"a step, {kind}: controller {parts[0]:.1f} ms, engines {parts[1]:.1f} ms, Ray's own {parts[2]:.1f} ms")
    ratios = [
        (one[0] + one[1]) / (other[0] + other[1]) for one, other in zip(costs["ray"], costs["local"], strict=True)
    ]
    print(f"ratios: {', '.join(f'{ratio:.3f}' for ratio in sorted(ratios))}", flush=True)
    return [claim("a step under Ray over local, controller and engines", statistics.median(ratios), "", 1.05)]


def processes(controller: int, kind: str) -> tuple[float, float, float]:
    """Return the processor seconds so far of a run's process, of its engines, and of Ray's processes. Engines that Ray
    has placed are below its processes, and local ones below the run's."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    commands = {process: command_of(process) for process in parents if os.getpid() in ancestors(process, parents)}
    runs = {process for process, words in commands.items() if b"sparring.cli.main\0run" in words}
    engines = own = 0.0
    for process, words in commands.items():
        above = set(ancestors(process, parents))
        if b"--until-input-ends" in words:
            engines += whole_s(process) if (controller in above if kind == "local" else not above & runs) else 0.0
        elif process not in runs and b"ray" in words:
            own += whole_s(process)
    return whole_s(controller), engines, own


def ancestors(process: int, parents: dict[int, int]) -> Iterator[int]:
    """Yield the parent of a process, and its parent."""
    while (process := parents.get(process, 0)) > 1:
        yield process


def command_of(process: int) -> bytes:
    """Return the command of a process; nothing if it has ended."""
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return b""


def whole_s(process: int) -> float:
    """Return the processor seconds of another process, of threads that have ended too."""
    try:
        fields: Any = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
