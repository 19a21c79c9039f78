"""`boxes/` installs the boxes without the rest of Sparring: from its folder, from git and as a wheel."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

pytestmark = pytest.mark.full  # make test-boxes runs it; tests/unit/sandbox tests the same files where all is installed

ROOT = Path(__file__).resolve().parents[3]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
OFFLINE = ["-q", "--no-index", "--no-deps"]
IMPORTS = """
import importlib, pathlib, sparring
root = pathlib.Path(sparring.__file__).parent
shipped = [".".join(file.relative_to(root.parent).with_suffix("").parts) for file in root.rglob("*.py")]
shipped = [name.removesuffix(".__init__") for name in shipped if ".inner" not in name and "for_inspect" not in name]
for name in shipped:
    if ".sandbox" in name:
        importlib.import_module(name)
print("beside what boxes import:", *sorted(set(shipped) - set(sys.modules)))
try:
    sparring.run
except ImportError as error:
    print(error)
"""


def run(*words: object, fails: bool = False) -> str:
    done = subprocess.run([*map(str, words)], capture_output=True, text=True, check=False)
    assert (done.returncode != 0) is fails, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def tree() -> Iterator[Path]:
    """A repository of this tree, in a folder that the boxes' user can read."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        tree.chmod(0o755)
        left_out = shutil.ignore_patterns("__pycache__", "*.egg-info", "build", "*.so")
        for name in ("src", "boxes"):
            shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=left_out)
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, tree / name)
        who = ("-c", "user.name=x", "-c", "user.email=x@y")
        run("git", "init", "-q", tree)
        run("git", "-C", tree, "add", ".")
        run("git", "-C", tree, *who, "commit", "-q", "-m", "x")
        yield tree


def alone(place: Path, code: str, *, fails: bool = False) -> str:
    """Run a program that finds the standard library, msgspec and what was installed, and no other package."""
    if not (link := place / "msgspec").exists():
        link.symlink_to(Path(msgspec.__file__).parent)
    return run(sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(place)!r})\n{code}", fails=fails)


@pytest.mark.parametrize("source", ["{}/boxes", "git+file://{}#subdirectory=boxes"])
def test_boxes_run_where_nothing_but_msgspec_is(tree: Path, source: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        place.chmod(0o755)
        run(*PIP, "install", *OFFLINE, "--no-build-isolation", "--target", place, source.format(tree))
        told = alone(place, IMPORTS).splitlines()
        assert told == [
            "beside what boxes import: sparring.__main__ sparring.observe.wait_reports",  # which `image pull` imports
            "sparring.run: expected Sparring, got its boxes alone; install sparring, which has the boxes",
        ]
        [line] = alone(
            place, "import runpy; runpy.run_module('sparring', run_name='__main__')", fails=True
        ).splitlines()
        assert "sparring, which is not installed" in line and "do: run sparring-boxes" in line
        [example] = re.findall(r"```python\n(.*?)```", (ROOT / "boxes/README.md").read_text(), re.DOTALL)
        assert alone(place, example) == "0 ['1', '2', '3']\n[b'3', b'1', b'2']\n"
        command = "from sparring.sandbox.verbs import main; sys.exit(main({!r}))"
        assert alone(place, command.format(["image", "list"])).startswith("NAME ")
        archive = ["image", "pull", "/nowhere.tar", "--as", "x"]
        assert "sparring-boxes: " in alone(place, command.format(archive), fails=True)


def test_two_owners_of_the_same_files_are_refused_by_name(tree: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        wheels, place = Path(folder, "wheels"), Path(folder, "alone")
        for source in (tree, tree / "boxes"):
            run(*PIP, "wheel", *OFFLINE, "--no-build-isolation", "--wheel-dir", wheels, source)
        run(sys.executable, "-m", "venv", "--without-pip", place)
        python = place / "bin/python"
        pip = [*PIP[:3], "--python", python, *PIP[3:]]
        whole, boxes = sorted(wheels.glob("*.whl"))
        run(*pip, "install", *OFFLINE, boxes)
        [packages] = place.glob("lib/python*/site-packages")
        (packages / "msgspec").symlink_to(Path(msgspec.__file__).parent)
        assert "doctor" in run(place / "bin/sparring-boxes", "--help")
        run(*pip, "install", *OFFLINE, whole)
        told = run(python, "-c", "import sparring.errors", fails=True)
        assert "got both, which own the same files; do: pip uninstall -y sparring sparring-boxes" in told
        run(*pip, "uninstall", "-q", "-y", "sparring", "sparring-boxes")
        run(*pip, "install", *OFFLINE, whole)
        run(python, "-c", "import sparring.errors")


def test_an_archive_without_sources_is_refused(tree: Path) -> None:
    code = (
        f"import os; os.chdir({str(tree / 'boxes')!r}); from setuptools import build_meta; build_meta.build_sdist('x')"
    )
    assert "which lacks ../src; do: pip wheel ./boxes" in run(sys.executable, "-c", code, fails=True)
