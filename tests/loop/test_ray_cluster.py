"""Engines on the nodes of a real Ray cluster: three nodes on this machine, of which one is killed."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from own_processes import processes_below
from test_fleet_run import check_ended, check_same, words

from sparring.cli.main import main

pytestmark = pytest.mark.cluster
STAGES = 'run.stages=["rl"]'
QUIET = "observe.lines_every_s=0.01"


@pytest.fixture
def nodes() -> Iterator[Any]:
    """Three nodes with a processor each."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=1)
        yield cluster
    finally:
        cluster.shutdown()


def on_ray(nodes: Any, engines: int = 2) -> tuple[str, ...]:
    threads = ("cluster.engine_threads=1", "engine.silent_s=2")
    return ("cluster.kind=ray", f"cluster.address={nodes.address}", f"cluster.engines={engines}", *threads)


def started(recipe: Path, name: str, *settings: str) -> subprocess.Popen[str]:
    command = (sys.executable, "-m", "sparring.cli.main", *words(recipe, name, *settings))
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def is_engine(command: bytes) -> bool:
    """Whether a process with this command, whose words end with zero bytes, is an engine."""
    return b"--until-input-ends" in command.split(b"\0")


def servers() -> list[int]:
    """Process ids of all engines on the nodes, which are children of this process."""
    return processes_below(os.getpid(), is_engine)


def node_with(cluster: Any, wanted: Callable[[bytes], bool]) -> Any:
    """A node besides the head with a process of a wanted command (`processes_below`)."""
    daemons = {node: node.all_processes["raylet"][0].process.pid for node in cluster.list_all_nodes()[1:]}
    return next(node for node, daemon in daemons.items() if processes_below(daemon, wanted))


def test_a_node_that_dies_costs_the_run_nothing(given: Path, nodes: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Its engine is placed on another one, and comes back there."""
    longer = (STAGES, QUIET, "rl.steps=600")
    assert main(words(given, "own", *longer)) == 0
    with started(given, "ray", *longer, *on_ray(nodes)) as run:
        assert run.stdout is not None
        output, killed = list[str](), False
        for line in run.stdout:
            output.append(line)
            if line.startswith("rl ") and not killed:
                killed = True
                nodes.remove_node(node_with(nodes, is_engine), allow_graceful=False)
        assert run.wait() == 0, "".join(output)
    assert killed and "is left out" in "".join(output) and "gets requests again" in "".join(output)
    check_same(given, "ray", capsys)
    lines = [json.loads(line) for line in (given.parent / "runs/ray/metrics.jsonl").read_text().splitlines()]
    events = [line for line in lines if "kind" in line]
    starts = [event["event"] for event in events if event["kind"] == "engine starts"]
    assert starts[0] == "starting 2 engines on 3 nodes" and starts[-1].startswith("2 engines ready after ")
    [lost], [back] = ([event for event in events if event["kind"] == f"engine {what}"] for what in ("lost", "back"))
    assert lost["engine"] == back["engine"] and lost["node"] == back["node"] == socket.gethostname() and lost["reason"]
    log = given.parent / "runs/ray/ray.log"
    printed = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    assert printed and not set(printed) & set(map(str.strip, output)), "Ray's own lines are in its log"


@pytest.mark.slow
def test_an_engine_without_a_place_ends_the_run_by_name(given: Path) -> None:
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    try:
        only = cluster.add_node(num_cpus=1)
        longer = (STAGES, QUIET, "rl.steps=5000", "cluster.start_timeout_s=40")
        with started(given, "ray", *longer, *on_ray(cluster, engines=1)) as run:
            assert run.stdout is not None
            output, killed = list[str](), False
            for line in run.stdout:
                output.append(line)
                if line.startswith("rl ") and not killed:
                    killed = True
                    cluster.remove_node(only, allow_graceful=False)
            assert run.wait() not in (0, -signal.SIGKILL), "".join(output)
    finally:
        cluster.shutdown()
    text = "".join(output)
    expected = "engine 0 on Ray: expected a node with 1 free CPUs for it, got 0 free on all nodes together, beside 0 of"
    assert killed and expected in text and "Traceback" not in text, text


def test_engines_start_once_for_all_stages(given: Path, nodes: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """No node has the model's folder: it travels. The record has the bits of a run with an engine of its own."""
    stages = ('run.stages=["rl", "eval"]', QUIET)
    assert main(words(given, "own", *stages)) == 0
    before, seen, during = set(servers()), set[int](), set[str]()
    with started(given, "ray", *stages, *on_ray(nodes)) as run:
        assert run.stdout is not None
        output = list[str]()
        for line in run.stdout:
            output.append(line)
            seen |= (there := set(servers()) - before)
            during |= {line.partition(" ")[0]} if there else set()
        assert run.wait() == 0, "".join(output)
    assert {"rl", "eval"} <= during and len(seen) == 2, "".join(output)
    check_same(given, "ray", capsys)
    check_ended(seen)


def test_what_a_cluster_cannot_give_is_refused(given: Path, nodes: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with started(given, "much", *on_ray(nodes, engines=9), "cluster.wait_s=1") as run:
        assert run.stdout is not None
        output = run.stdout.read()
        assert run.wait() == 2, output
    assert "cluster.engines: expected 9 engines of 1 CPUs on the Ray cluster, got 3" in output
    assert "Traceback" not in output


def test_an_address_without_a_cluster_is_refused(given: Path) -> None:
    with started(given, "none", "cluster.kind=ray", "cluster.address=127.0.0.1:1") as run:
        assert run.stdout is not None
        output = run.stdout.read()
        assert run.wait() == 2, output
    assert "cluster.address: expected a Ray cluster at 127.0.0.1:1" in output and "Traceback" not in output


def test_a_cluster_that_takes_connections_and_never_answers_is_refused(given: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with started(given, "none", "cluster.kind=ray", f"cluster.address={address}", "cluster.wait_s=1") as run:
            assert run.stdout is not None
            output = run.stdout.read()
            assert run.wait() == 2, output
    assert f"cluster.address: expected a Ray cluster at {address} that answers within cluster.wait_s" in output


@pytest.mark.parametrize("how", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGKILL])
def test_a_run_that_ends_leaves_no_engine(how: signal.Signals, given: Path, nodes: Any) -> None:
    before, there, output = set(servers()), set[int](), list[str]()
    with started(given, "ended", STAGES, QUIET, "rl.steps=5000", *on_ray(nodes)) as run:
        assert run.stdout is not None
        for line in run.stdout:
            output.append(line)
            if line.startswith("rl "):
                there = set(servers()) - before
                run.send_signal(how)
                break
        run.stdout.read()
    assert len(there) == 2, "".join(output)
    check_ended(there)
