"""Ranks of a trainer on the nodes of a real Ray cluster have the bits of one process, whatever happens to one of them.

Nodes are on this machine; one that has a /dev/shm of its own is as one on another machine, which shares a folder.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from own_processes import processes_below
from test_engine_elsewhere import ALONE, HIDDEN
from test_fleet_run import check_ended, check_same, words
from test_ranks_run import measured
from test_ray_cluster import QUIET, is_engine, node_with, nodes, on_ray, started

from sparring.cli.main import main

__all__ = ["nodes"]
pytestmark = pytest.mark.cluster
STAGES = 'run.stages=["rl", "eval"]'
RANKS = ("cluster.ranks=2", "cluster.rank_threads=1")


def is_rank(command: bytes) -> bool:
    """Whether a process with this command is a rank."""
    return b"sparring.cluster.rank_process" in command.split(b"\0")


def ranks() -> list[int]:
    """Process ids of the ranks on all nodes."""
    return processes_below(os.getpid(), is_rank)


def finished(run: subprocess.Popen[str]) -> tuple[int, str]:
    """The status of a run, and what it prints from here on."""
    assert run.stdout is not None
    return run.wait(), run.stdout.read()


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_ranks_on_ray_change_no_token_and_no_weight(
    dtype: str, given: Path, nodes: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    of_type = (STAGES, f"models.policy.dtype={dtype}")
    assert main(words(given, "own", *of_type)) == 0
    with started(given, "two", *of_type, *on_ray(nodes, engines=1), *RANKS) as run:
        status, output = finished(run)
    assert status == 0, output
    check_same(given, "two", capsys)
    own, two = (measured(given.parent / "runs" / name) for name in ("own", "two"))
    assert own == two and len(own) == 6 and all(values["tokens_trained"] > 0 for values in own)


def check_survives(given: Path, nodes: Any, capsys: pytest.CaptureFixture[str], lose: Any, *settings: str) -> str:
    """Check that a run ends as an undisturbed one if `lose` is called after its second step; return what it printed."""
    longer = (STAGES, QUIET, "rl.steps=30", "cluster.timeout_s=6")
    assert main(words(given, "own", *longer)) == 0
    output, lost = list[str](), False
    with started(given, "hit", *longer, *on_ray(nodes, engines=1), *RANKS, *settings) as run:
        assert run.stdout is not None
        for line in run.stdout:
            output.append(line)
            if line.startswith("rl 2/") and not lost:
                lost = True
                lose()
        assert run.wait() == 0, "".join(output)
    text = "".join(output)
    assert lost and "ranks are started again" in text and "Traceback" not in text, text
    check_same(given, "hit", capsys)
    assert not ranks()
    return text


@pytest.mark.parametrize(
    "how",
    [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)],
    ids=["dies", "stands still"],
)
def test_a_rank_that_is_lost_costs_the_run_nothing(
    how: signal.Signals, given: Path, nodes: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    check_survives(given, nodes, capsys, lambda: os.kill(ranks()[-1], how))


@pytest.mark.slow  # ranks that give way are fewer too
def test_a_node_that_dies_leaves_fewer_ranks(given: Path, nodes: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Three processors become two, of which the engine has one: the node that dies has a rank."""

    def lose() -> None:
        nodes.remove_node(node_with(nodes, is_rank), allow_graceful=False)

    text = check_survives(given, nodes, capsys, lose, "cluster.wait_s=25")
    assert "the trainer has ranks: 1, of 2" in text, text


def test_ranks_give_way_to_the_only_engine(given: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Three processors become two, which the ranks have: the node that dies has the engine."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})

    def lose() -> None:
        cluster.remove_node(node_with(cluster, is_engine), allow_graceful=False)

    try:
        for _ in range(3):
            cluster.add_node(num_cpus=1)
        text = check_survives(given, cluster, capsys, lose, "cluster.wait_s=25")
    finally:
        cluster.shutdown()
    assert "gave its processors to engine 0, which had no place left" in text, text
    assert "the trainer has ranks: 1, of 2" in text, text


def test_more_ranks_than_the_cluster_has_are_refused(given: Path, nodes: Any) -> None:
    settings = (*on_ray(nodes, engines=1), "cluster.ranks=3", "cluster.rank_threads=1", "cluster.wait_s=1")
    with started(given, "much", *settings) as run:
        status, output = finished(run)
    assert status == 2, output
    assert "expected 1 engines of 1 CPUs on the Ray cluster and 3 ranks of 1 CPUs, got 3" in output
    assert "Traceback" not in output and not (given.parent / "runs/much/metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("how", "stopped"),
    [
        (signal.SIGINT, False),
        pytest.param(signal.SIGINT, True, marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, False, marks=pytest.mark.slow),
        (signal.SIGKILL, True),
    ],
)
def test_a_run_that_ends_leaves_no_rank(how: signal.Signals, stopped: bool, given: Path, nodes: Any) -> None:
    with started(given, "ended", STAGES, QUIET, "rl.steps=5000", *on_ray(nodes, engines=1), *RANKS) as run:
        assert run.stdout is not None
        for line in run.stdout:
            if line.startswith("rl ") and len(there := ranks()) == 2:
                break
        if stopped:
            os.kill(there[0], signal.SIGSTOP)
        run.send_signal(how)
        check_ended(there)
        run.stdout.read()


@contextmanager
def node_elsewhere(cluster: Any, hidden: Path | str = "") -> Iterator[None]:
    """A node with two processors that shares no memory with this machine, and from which a folder is hidden."""
    ray = str(Path(sys.executable).with_name("ray"))
    words = ["start", f"--address={cluster.address}", "--num-cpus=2", "--object-store-memory=80000000", "--block"]
    script = f"set -e; {HIDDEN}".replace("size=64m", "size=300m")
    command = [*ALONE, script, "alone", str(hidden), ray, *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as node:
        try:
            assert node.stdout is not None
            assert any("Ray runtime started" in line for line in node.stdout), "it has joined"
            yield
        finally:
            node.send_signal(signal.SIGTERM)
            node.wait()


@pytest.fixture
def head() -> Iterator[Any]:
    """A cluster whose only node has a processor for an engine, and none for ranks."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        yield cluster
    finally:
        cluster.shutdown()


def test_a_rank_on_another_machine_publishes_and_saves(
    given: Path, head: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both ranks are there, so the weights come back through the run's folder, and checkpoints are written there."""
    assert main(words(given, "own", STAGES)) == 0
    with node_elsewhere(head), started(given, "away", STAGES, *on_ray(head, engines=1), *RANKS) as run:
        status, output = finished(run)
    assert status == 0, output
    check_same(given, "away", capsys)
    left = [path.name for path in (given.parent / "runs/away").iterdir()]
    assert not any(re.match(r"\.?(sparring-weights|seen)-", name) for name in left), left


def test_a_node_that_does_not_see_the_run_is_refused(given: Path, head: Any) -> None:
    (given.parent / "runs").mkdir()
    with node_elsewhere(head, hidden=given.parent / "runs"):
        settings = (STAGES, *on_ray(head, engines=1), *RANKS)
        with started(given, "away", *settings) as run:
            status, output = finished(run)
    assert status == 2, output
    assert "the folder" in output and "put it on a file system that all nodes share" in output
