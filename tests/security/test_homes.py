"""Boxes show the program and nothing else of its user's home, in every usual layout, and the program starts."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from homes import PROGRAMS, SECRETS, furnish, own
from image_files import open_folder

from sparring.errors import BadInput
from sparring.harness.find import Installation, find_program
from sparring.harness.preset import AgentProgram
from sparring.sandbox.bubblewrap import BubblewrapBoxes
from sparring.sandbox.config import SandboxConfig
from sparring.sandbox.mounts import box_identity, in_every_box, is_private
from sparring.types import BoxSpec

ORDINARY = 12345
USERS = [0, ORDINARY] if os.geteuid() == 0 else [os.geteuid()]
LOOK = "import os, sys\nprint(*[path for path in sys.argv[1:] if os.path.lexists(path)])"


@pytest.fixture(scope="module", params=USERS)
def home(request: pytest.FixtureRequest) -> Iterator[tuple[Path, int, str]]:
    """A furnished home outside /tmp, its user, and that user's PATH."""
    with open_folder() as folder:
        path = furnish(folder / "home")
        if request.param == ORDINARY:
            own(folder / "home", ORDINARY)
        yield folder / "home", request.param, path


@contextmanager
def living_in(home: Path, path: str) -> Iterator[None]:
    before = dict(os.environ)
    os.environ |= {"HOME": str(home), "PATH": path}
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def as_user(uid: int, work: Any, *arguments: Any) -> Any:
    """Return what a function comes to in a process of that user's."""
    if uid == os.geteuid():
        return work(*arguments)
    ours, theirs = multiprocessing.Pipe()

    def child() -> None:
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
        theirs.send(work(*arguments))

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    theirs.close()
    answer = ours.recv()  # EOFError where it raised, with its traceback on stderr
    process.join()
    return answer


def find(name: str, **settings: Any) -> Installation:
    return find_program(AgentProgram(command=(name,), **settings), Path("/no/programs"))


def shown(mounts: dict[str, str], commands: list[list[str]], config: SandboxConfig | None = None) -> list[str]:
    """Return what commands say in a box of these mounts."""

    async def work() -> list[str]:
        boxes = BubblewrapBoxes(config or SandboxConfig(servers=1), mounts)
        box = await boxes.take(BoxSpec(timeout_s=20.0))
        said = []
        for command in commands:
            result = await box.exec(command)
            said.append((result.stdout + result.stderr).strip())
        await boxes.close()
        return said

    return asyncio.run(work())


def visit(home: Path, path: str) -> dict[str, str]:
    """Return what each program says in one box that has the mounts of all, and which secrets it sees."""
    with living_in(home, path):
        found = {name: find(name) for name in PROGRAMS}
        mounts = {target: source for one in found.values() for target, source in one.mounts.items()}
        commands = []
        for one in found.values():
            variables = [f"{key}={value}" for key, value in one.environment.items()]
            commands.append(["env", "-i", "HOME=/agent", f"PATH={one.search}", *variables, *one.start])
        assert find(str(home / "bin/one")) == found["one"]  # by its path
        commands.append(["python3", "-c", LOOK, *(str(home / secret) for secret in SECRETS)])
        commands.append(["grep", "-rlI", "SECRET", str(home)])
        return dict(zip([*PROGRAMS, "secrets", "found"], shown(mounts, commands), strict=True))


def test_every_program_starts_and_no_secret_is_seen(home: tuple[Path, int, str]) -> None:
    folder, uid, path = home
    assert as_user(uid, visit, folder, path) == {name: name for name in PROGRAMS} | {"secrets": "", "found": ""}


def refused(home: Path, path: str, name: str, **settings: Any) -> str:
    """Return the refusal of a program, empty where it is found."""
    with living_in(home, path):
        try:
            find(name, **settings)
        except BadInput as error:
            return str(error)
    return ""


@pytest.fixture
def bare() -> Iterator[Path]:
    """An empty home outside /tmp."""
    with open_folder() as folder:
        yield folder


def written(path: Path, text: str = "#!/bin/sh\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def test_a_linked_package_a_stand_in_without_its_version_and_tmp_are_refused_by_name(bare: Path) -> None:
    project = written(bare / "project/cli.js", "#!/usr/bin/env node\n").parent
    (bare / "lib/node_modules").mkdir(parents=True)
    (bare / "lib/node_modules/linked").symlink_to(project)
    written(bare / "bin/linked").unlink()
    (bare / "bin/linked").symlink_to("../lib/node_modules/linked/cli.js")
    assert f"a link to {project}/cli.js; do: npm install --install-links" in refused(bare, f"{bare}/bin", "linked")
    written(bare / ".pyenv/shims/none")
    written(bare / ".pyenv/bin/pyenv", "#!/bin/sh\nexit 127\n")
    assert "for which pyenv has none; do: choose a version" in refused(bare, f"{bare}/.pyenv/shims:/bin", "none")
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        written(Path(folder) / "agent")
        assert "over which their own folder lies; do: move it" in refused(bare, f"{folder}:/bin", "agent")


def test_a_python_that_was_installed_into_a_home_is_refused(bare: Path) -> None:
    for prefix in (bare, bare / ".local"):
        python = written(prefix / "bin/python3.11", "")
        written(prefix / "lib/python3.11/os.py", "")
        script = written(bare / "tools/agent", f"#!{python}\n")
        said = refused(bare, str(script.parent), "agent")
        assert f"whose folder is {prefix}, which holds what is not its own; do: install it" in said


def test_a_private_home_is_told_with_its_way_out(bare: Path) -> None:
    """Where boxes run as nobody, for root; another user's boxes enter his own home."""
    closed = bare / "closed"
    agent = written(closed / "bin/agent")
    closed.chmod(0o700)
    said = [refused(closed, f"{closed}/bin", "agent")]
    closed.chmod(0o711)
    agent.chmod(0o700)
    said.append(refused(closed, f"{closed}/bin", "agent"))
    told = [f"cannot read {closed} (mode 0700); do: chmod o+x {closed}", f"(mode 0700); do: chmod o+rx {agent}"]
    expected = told if box_identity() else ["", ""]
    assert all(way in text and bool(way) == bool(text) for way, text in zip(expected, said, strict=True))


def look_from_python(home: Path, path: str) -> list[str]:
    with living_in(home, path):
        python = home / "miniconda3/envs/e/bin/twelve"
        config = SandboxConfig(servers=1, python=str(next(python.parent.glob("python3*"))))
        return shown({}, [["python3", "-c", LOOK, *(str(home / secret) for secret in SECRETS)]], config)


def test_an_interpreter_of_a_home_brings_its_prefix_alone(home: tuple[Path, int, str]) -> None:
    folder, uid, path = home
    assert as_user(uid, look_from_python, folder, path) == [""]


def look_at_programs(home: Path, path: str) -> list[str]:
    with living_in(home, path):
        preset = AgentProgram(command=("fourteen",))
        found = find_program(preset, home / "work")
        secrets = [f"/opt/harness/{name}" for name in os.listdir(home / "work") if name not in ("node_modules", "venv")]
        return shown(dict(found.mounts), [["python3", "-c", LOOK, *secrets, *(str(home / s) for s in SECRETS)]])


def test_a_folder_of_programs_shows_its_two_parts_alone(home: tuple[Path, int, str]) -> None:
    """Where `rollout.programs` names a project or a home, what lies beside is not seen."""
    folder, uid, path = home
    assert as_user(uid, look_at_programs, folder, path) == [""]


@pytest.mark.parametrize(
    ("folder", "private"),
    [
        ("/", True),
        ("/home", True),
        ("/home/somebody", True),
        ("/home/somebody/.local/share", True),
        ("/home/somebody/.config", True),
        ("/home/somebody/.ssh", True),
        ("/home/somebody/.npm-global", True),
        ("/root/.cache", True),
        ("/root/.local", True),
        ("/home/somebody/.local/share/uv", False),
        ("/home/somebody/project", False),
        ("/opt/agent", False),
    ],
)
def test_folders_that_are_never_mounted(folder: str, private: bool) -> None:
    assert is_private(Path(folder)) is private


def test_a_home_under_usr_is_not_seen() -> None:
    """As in images whose user lives in /usr/src/app."""
    with living_in(Path("/usr/share/doc"), os.environ["PATH"]):
        (seen,) = shown({}, [["ls", "/usr/share/doc"]])
        assert not in_every_box(Path("/usr/share/doc/x"))
    assert (seen, in_every_box(Path("/usr/share/doc/x"))) == ("", True)
