"""What a run is told of its memory, through the real command line: refused, warned, and said again where memory runs
out. And what is said of a small model bounds what the process of a real run has."""

import re
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from forked import Forked, finished

from sparring.cli.main import main

COMMAND = (sys.executable, "-m", "sparring.cli.main", "run")
HUGE = "engine.kv.offload_bytes=70368744177664"
"""64 TiB of host memory, which no machine has."""
WARN = "run.memory=warn"


def words(recipe: Path, *overrides: str) -> list[str]:
    return [str(recipe), *(word for override in ('run.stages=["rl"]', *overrides) for word in ("--set", override))]


def limited() -> None:
    """In the child: less address space than the run asks for."""
    resource.setrlimit(resource.RLIMIT_AS, (64 << 30, 64 << 30))


OFFLOAD = (HUGE, 'engine.kv.across_turns="offload"', "models.policy.dtype=float32")


def test_a_run_that_does_not_fit_is_refused_and_says_how_to_go_on(
    given: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", *words(given, *OFFLOAD)]) == 2
    said = capsys.readouterr().err
    assert re.match(
        r"memory: expected \d+\.\d GiB in stage rl \(.*engines' caches 65536\.\d",
        said,
    )
    assert 'or set run.memory = "warn" to begin all the same' in said


@pytest.mark.full
def test_a_run_that_is_out_of_memory_repeats_its_warning(given: Path) -> None:
    done = subprocess.run(
        [*COMMAND, *words(given, WARN, *OFFLOAD)], preexec_fn=limited, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stderr
    assert re.search(r"^check: memory: warning: expected \d{5}\.\d GiB", done.stdout, re.M)
    assert re.search(r"memory ran out: .*memory: warning: expected \d{5}\.\d GiB", done.stderr)


@pytest.mark.full
def test_a_resumed_run_repeats_the_memory_estimate(
    given: Path, wait_for: Callable[[subprocess.Popen[str], str], None]
) -> None:
    """A kernel that is short of memory kills so."""
    command = ["run", *words(given, "rl.steps=24")]
    with Forked(command, stdout=subprocess.PIPE) as run:
        wait_for(run, "rl 1/24")
        run.kill()
    again = finished(command)
    assert again.returncode == 0, again.stderr
    assert re.search(
        r"^run: the process before this one was killed.*memory: about 0\.",
        again.stdout,
        re.M,
    )
    once_more = finished(command)
    assert once_more.returncode == 0 and "was killed" not in once_more.stdout


MEASURED = "import os, subprocess, sys; print(os.wait4(subprocess.Popen(sys.argv[1:]).pid, 0)[2].ru_maxrss)"
"""A small process that starts the run and prints its peak in KiB: a child's peak begins at what its parent has."""


@pytest.mark.full
def test_the_estimate_bounds_the_memory_of_a_run(given: Path) -> None:
    run = [*COMMAND, *words(given, "engine.kv.tokens=4096")]
    text = subprocess.run([sys.executable, "-c", MEASURED, *run], capture_output=True, text=True, check=True).stdout
    found = re.search(r"memory: about ([\d.]+) GiB", text)
    assert found is not None and "wall clock" in text, text
    measured = int(text.splitlines()[-1]) / 2**20
    assert measured <= float(found[1]) <= 1.5 * measured + 0.01, "which is said in hundredths"
