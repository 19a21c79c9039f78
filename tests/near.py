"""Tests that a change can touch, nearest first: what `make test-near` runs.

    python tests/near.py [BASE]

Prints the test files that reach a changed file through imports, those in functions and under TYPE_CHECKING included,
ordered by the number of imports between. Changed is what differs from the commit BASE (origin/main, else the commit
before), and what git does not know yet. A changed file that is no module (a recipe, a page, C++) counts as every module
and test that names it. Nothing is printed where no test is near.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path

STAGES = "sparring.launch.run"
"""Imports the stages by name, which no import statement says."""


def modules(root: Path) -> dict[str, Path]:
    """Map every Python file of src, tests and benchmarks to its dotted name; tests have that of their path."""
    files = [*root.glob("src/sparring/**/*.py"), *root.glob("tests/**/*.py"), *root.glob("benchmarks/**/*.py")]
    return {_name(file.relative_to(root)): file for file in files}


def _name(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[1:] if parts[0] == "src" else parts).removesuffix(".__init__")


def imported(name: str, file: Path, known: Mapping[str, Path]) -> set[str]:
    """Return the modules that a file imports, with the conftest files that pytest gives it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    if name == STAGES:
        names |= {stage for stage in known if stage.startswith("sparring.stages.")}
    if name.startswith("tests."):
        parts = name.split(".")
        names |= {".".join([*parts[:depth], "conftest"]) for depth in range(1, len(parts))}
        names |= {f"{name.rpartition('.')[0]}.{other}" for other in names if "." not in other}
        names |= {f"tests.{other}" for other in names}
    if name.startswith(("tests.", "benchmarks.")):
        names |= {f"benchmarks.{other}" for other in names}
        if name.startswith("tests.loop."):
            names.add("sparring.cli.main")  # most of them run the command in a process of its own
    if name == "sparring.cli.main":
        names |= {verb for verb in known if verb.startswith("sparring.cli.")}
    return {other for other in names & known.keys() if other != name}


def distances(root: Path, changed: set[Path]) -> dict[str, int]:
    """Map each module that reaches a changed file to the least number of imports between."""
    known = modules(root)
    importers: dict[str, set[str]] = {}
    for name, file in known.items():
        for other in imported(name, file, known):
            importers.setdefault(other, set()).add(name)
    near = {name: 0 for name, file in known.items() if file in changed}
    for path in changed - set(known.values()):
        near |= {name: 1 for name, file in known.items() if path.name in file.read_text(encoding="utf-8")} | near
    waiting = deque(sorted(near, key=near.__getitem__))
    while waiting:
        name = waiting.popleft()
        for importer in importers.get(name, ()):
            if importer not in near:
                near[importer] = near[name] + 1
                waiting.append(importer)
    return near


def near_tests(root: Path, changed: set[Path]) -> list[str]:
    """Return the test files that a change can touch, nearest first; the house's come last, for they read everything."""
    near = distances(root, changed)
    tests = [name for name in near if name.startswith("tests.") and name.rpartition(".")[2].startswith("test_")]
    files = [
        str(Path(*name.split(".")).with_suffix(".py")) for name in sorted(tests, key=lambda name: (near[name], name))
    ]
    house = sorted(str(file.relative_to(root)) for file in root.glob("tests/house/test_*.py"))
    return [*(file for file in files if file not in house), *house] if changed else []


def changed_files(root: Path, base: str | None) -> set[Path]:
    """Return the files that differ from the commit `base`, and those that git does not know."""
    if base is None:
        has_origin = not subprocess.run(
            ["git", "rev-parse", "-q", "--verify", "origin/main"], cwd=root, capture_output=True
        ).returncode
        base = "origin/main" if has_origin else "HEAD~1"
    lines = [*_git(root, "diff", "--name-only", base), *_git(root, "ls-files", "--others", "--exclude-standard")]
    return {root / line for line in lines}


def _git(root: Path, *words: str) -> Iterator[str]:
    done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True)
    yield from done.stdout.splitlines()


if __name__ == "__main__":
    here = Path(__file__).resolve().parents[1]
    print("\n".join(near_tests(here, changed_files(here, sys.argv[1] if len(sys.argv) > 1 else None))))
