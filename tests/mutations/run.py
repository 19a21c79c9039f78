"""Small wrong changes that the short suite must notice: what `make test-mutations` runs.

    python tests/mutations/run.py [WORD]

Each mutation of `mutations.toml` is one text for another in one file of a copy of the tree. The tests that it names run
there as `make test` has them, and one of them must fail. Mutations whose name has WORD are tried, all without one. Two
run at once, each in a copy of its own.

Before the first, the tests that are named pass on the tree as it is, and each text to be changed stands in its file
once; else no mutation is tried. The exit status is 0 where every mutation was noticed, 1 where one was not, 2 where the
list does not fit the tree.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).resolve().parents[2]
LIST = Path(__file__).with_name("mutations.toml")
COPIES = 2
TIMEOUT_S = 600.0
"""Seconds for the tests of one mutation. Tests that hang longer do not pass: it counts as noticed."""
FAILED = 1
"""Exit status of pytest where a test failed."""
_moments = count(1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Mutation:
    """Wrong change of one file.

    Attributes:
        name: law or room, and what goes wrong.
        file: changed file, from the root of the tree.
        before: text that stands in it once.
        after: wrong text in its place.
        tests: folders and files of tests of which one must fail.
    """

    name: str
    file: str
    before: str
    after: str
    tests: Sequence[str]


def mutations(path: Path, word: str = "") -> list[Mutation]:
    """Read the mutations whose name has `word`."""
    listed = tomllib.loads(path.read_text(encoding="utf-8"))["mutation"]
    return [Mutation(**entry) for entry in listed if word in entry["name"]]


def misfits(root: Path, chosen: Iterable[Mutation]) -> list[str]:
    """Return a line for each mutation that does not fit the tree: its text does not stand in its file once, or tests
    that it names are not there."""
    lines = []
    for mutation in chosen:
        file = root / mutation.file
        found = file.read_text(encoding="utf-8").count(mutation.before) if file.is_file() else 0
        if found != 1:
            said = f"expected {mutation.before!r} once in {mutation.file}, got it {found} times"
            lines.append(f"{mutation.name}: {said}; write down what stands there now")
        for missing in (name for name in mutation.tests if not (root / name).exists()):
            lines.append(f"{mutation.name}: expected tests in {missing}, got none; name those that notice it")
    return lines


def copy_of(root: Path, folder: Path) -> Path:
    """Copy the files that git knows, and new ones that it does not ignore."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=root, capture_output=True, text=True, check=True).stdout.split("\0")
    for name in filter(None, names):
        if (root / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(root / name, folder / name)
    return folder


@contextmanager
def mutated(tree: Path, mutation: Mutation) -> Iterator[None]:
    """Change a file of a copy while the body runs. Each text has a time of its own, by which Python knows whether what
    it compiled is of this text."""
    file = tree / mutation.file
    whole = file.read_text(encoding="utf-8")
    try:
        _write(file, whole.replace(mutation.before, mutation.after))
        yield
    finally:
        _write(file, whole)


def _write(file: Path, text: str) -> None:
    file.write_text(text, encoding="utf-8")
    moment = time.time() - 10**6 + next(_moments)
    os.utime(file, (moment, moment))


def status(tree: Path, tests: Sequence[str]) -> tuple[int, str]:
    """Run tests of a copy as the short suite has them, up to the first that fails; returns pytest's exit status and the
    last of what it says. Tests that hang have status FAILED."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return FAILED, f"no end after {TIMEOUT_S:.0f} s"
    lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return done.returncode, (lines or [done.stdout[-2000:] + done.stderr[-2000:]])[0]


def verdict(code: int, said: str) -> str:
    """Return "noticed", or what is wrong: a mutation that keeps the tests from being collected is not a small one."""
    if code == FAILED:
        return "noticed"
    return "not noticed: all tests pass" if code == 0 else f"pytest ended with {code}: {said}"


def tried(trees: SimpleQueue[Path], mutation: Mutation) -> str:
    """Run a mutation in the next copy that is free; returns the verdict, which is also printed."""
    tree, began = trees.get(), time.monotonic()
    try:
        with mutated(tree, mutation):
            code, said = status(tree, mutation.tests)
    finally:
        trees.put(tree)
    found = verdict(code, said)
    by = said.removeprefix("FAILED ")[:110] if code == FAILED else ""
    print(f"{time.monotonic() - began:5.0f} s  {mutation.name}: {found}  {by}", flush=True)
    return found


def main(word: str = "") -> int:
    """Try the mutations whose name has `word`."""
    chosen, began = mutations(LIST, word), time.monotonic()
    if lines := misfits(ROOT, chosen) or ([] if chosen else [f"expected a mutation named {word!r}, got none"]):
        print("\n".join(lines), file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        trees: SimpleQueue[Path] = SimpleQueue()
        for number in range(COPIES):
            trees.put(copy_of(ROOT, Path(folder) / str(number)))
        with ThreadPoolExecutor(COPIES) as pool:
            every = sorted({name for mutation in chosen for name in mutation.tests})
            halves = [half for half in (every[::2], every[1::2]) if half]
            for code, said in pool.map(status, [Path(folder) / str(number) for number in range(len(halves))], halves):
                if code:
                    print(
                        f"expected tests that pass on the tree as it is, got {said}; mend them first", file=sys.stderr
                    )
                    return 2
            found = list(pool.map(lambda mutation: tried(trees, mutation), chosen))
    wrong = [mutation.name for mutation, said in zip(chosen, found, strict=True) if said != "noticed"]
    minutes = (time.monotonic() - began) / 60
    print(f"{len(chosen) - len(wrong)} of {len(chosen)} mutations noticed in {minutes:.0f} minutes")
    print("".join(f"not noticed: {name}\n" for name in wrong), end="")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
