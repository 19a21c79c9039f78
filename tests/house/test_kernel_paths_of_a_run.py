"""`tests/conftest.py` in a process of its own: which kernel paths a run computes on, and what its last line says of the
others."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.full

ROOT = Path(__file__).resolve().parents[2]
KERNELS, PLAIN = "tests/unit/kernels", "tests/house/test_pages.py"
DEVICE = "exact-device (it computes on a GPU (make test-gpu), or in Triton's interpreter (make test-triton))"

PAIRS = (
    "make test-paths has it"
    if "avx512_bf16" in Path("/proc/cpuinfo").read_text().split()
    else "the processor has no AVX512_BF16; make test-paths tries software"
)


def lines(*words: str, **environment: str) -> list[str]:
    """What a run prints that passes."""
    own = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTEST", "SPARRING_KERNELS", "TRITON"))
    }
    command = [sys.executable, "-m", "pytest", "-vv", "-p", "no:cacheprovider", *words]
    done = subprocess.run(command, cwd=ROOT, env={**own, **environment}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout
    return done.stdout.splitlines()


def passed(found: list[str]) -> set[str]:
    """Names of cases, without those of pages."""
    return {case for line in found if "PASSED" in line for case in re.findall(r"::(test_\S+\])", line)}


def test_a_run_without_a_compiler_has_no_cases_of_compiled_paths_and_says_why() -> None:
    """Every path is asked for. Of tests for the compiled ones alone nothing is left, not even a skip."""
    found = lines(
        "--kernel-paths",
        "every",
        f"{KERNELS}/test_mixtures.py",
        PLAIN,
        "-k",
        "softmaxs or equal or link",
        CXX="no compiler of that name",
    )
    assert passed(found) == {f"test_gradients_are_the_softmaxs[exact-torch-{flag}]" for flag in (True, False)}
    because = "(no C++ compiler was found (g++, or what CXX names))"
    absent = ", ".join([*(f"{name} {because}" for name in ("exact-tiles", "exact-pairs", "exact-kernels")), DEVICE])
    assert found[-1] == f"kernel paths computed: exact-torch; not computed: {absent}"


@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_run_has_the_path_in_use_and_the_portable_one(workers: str) -> None:
    """Two paths, alone or with workers, which tell what they computed; a test for the path in use alone has one case."""
    two = "--kernel-paths", "two"
    chosen = f"{KERNELS}/test_mixtures.py", "-k", "softmaxs and True or without_compiled", "-n", workers, *two
    found = lines(*chosen, SPARRING_KERNELS="off")
    gradients = {f"test_gradients_are_the_softmaxs[{name}-True]" for name in ("exact-torch", "exact-kernels")}
    assert passed(found) == {*gradients, "test_without_compiled_kernels_a_mixture_is_refused[exact-torch]"}
    assert found[-1].startswith("kernel paths computed: exact-kernels, exact-torch; not computed: exact-tiles (")
    assert found[-1].endswith(f", exact-pairs ({PAIRS}), {DEVICE}")


def test_a_run_without_such_tests_says_nothing_of_paths() -> None:
    assert "kernel paths" not in lines(PLAIN)[-1]
