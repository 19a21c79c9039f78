"""Attacks on what a box is shown: by links, by what a program's own text names, by folders that look like packages."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from image_files import open_folder

from sparring.errors import BadInput
from sparring.harness.find import find_program
from sparring.harness.preset import AgentProgram
from sparring.sandbox.mounts import arguments_of, is_private

PYTHON = Path(os.path.realpath("/usr/bin/python3")).name


@pytest.fixture
def home() -> Iterator[Path]:
    """The home of the user who runs, outside /tmp, with a key."""
    before = dict(os.environ)
    with open_folder() as folder:
        (folder / ".ssh").mkdir()
        (folder / ".ssh/key").write_text("SECRET")
        os.environ["HOME"] = str(folder)
        yield folder
    os.environ.clear()
    os.environ.update(before)


def put(path: Path, text: str = "#!/bin/sh\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def link(path: Path, target: str | Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)


def shows(home: Path, folder: Path, name: str = "agent", programs: Path = Path("/none")) -> bool | str:
    """Return whether bubblewrap is asked to show the key, or the refusal."""
    os.environ["PATH"] = f"{folder}:/usr/bin:/bin"
    try:
        mounts = find_program(AgentProgram(command=(name,)), programs).mounts
    except BadInput as error:
        return str(error)
    words = arguments_of(mounts)
    key = home / ".ssh/key"
    bound = [Path(os.path.realpath(words[at + 1])) for at, word in enumerate(words) if word == "--ro-bind"]
    assert bound, "it is there"
    return any(key.is_relative_to(source) for source in bound)


@pytest.mark.parametrize(
    "text",
    [
        "#!{home}/.ssh/key\n",
        "#!/usr/bin/env {home}/.ssh/key\n",
        '#!/bin/sh\nexec "$basedir/../.ssh/key"\n',
        '#!/bin/sh\nexec "$basedir/../node_modules/../.ssh/key"\n',
        "#!/bin/sh\n'''exec' {home}/.ssh/key \"$0\" \"$@\"\n' '''\n",
    ],
)
def test_a_program_s_text_names_no_mount_that_is_no_program(home: Path, text: str) -> None:
    agent = put(home / "bin/agent", text.replace("{home}", str(home)))
    assert shows(home, agent.parent) is False


def test_a_program_that_is_a_link_to_a_key_is_none(home: Path) -> None:
    link(home / "bin/agent", home / ".ssh/key")
    assert "the program agent, got none" in str(shows(home, home / "bin"))


@pytest.mark.parametrize("part", ["lib/" + PYTHON, "lib64", "bin/other"])
def test_an_environment_whose_part_is_a_link_does_not_bring_what_it_leads_to(home: Path, part: str) -> None:
    put(home / "evil/pyvenv.cfg", "")
    agent = put(home / "evil/bin/agent")
    link(home / "evil" / part, home / ".ssh")
    assert shows(home, agent.parent) is not True


@pytest.mark.parametrize("part", ["share", "ssl", "lib64"])
def test_a_prefix_whose_part_is_a_link_does_not_bring_what_it_leads_to(home: Path, part: str) -> None:
    put(home / f"evil/lib/{PYTHON}/os.py", "")
    agent = put(home / "evil/bin/agent")
    link(home / "evil" / part, home)
    assert "holds what is not its own" in str(shows(home, agent.parent))


def test_a_home_that_looks_like_an_environment_is_none(home: Path) -> None:
    put(home / "pyvenv.cfg", "")
    put(home / ".local/pyvenv.cfg", "")
    assert shows(home, put(home / "bin/agent").parent) is False
    assert shows(home, put(home / ".local/bin/agent").parent) is False
    assert "holds what is not its own" in str(shows(home, put(home / ".local/bin/python3.99").parent, "python3.99"))


def test_a_link_to_the_home_that_looks_like_an_environment_is_none(home: Path) -> None:
    put(home / "pyvenv.cfg", "")
    put(home / "bin/agent")
    link(home / "tools/here", home)
    assert shows(home, home / "tools/here/bin") is False
    assert is_private(home / "tools/here") and is_private(home / "tools/here/.local")


@pytest.mark.parametrize("target", ["", ".ssh", "/", ".."])
@pytest.mark.parametrize("part", ["node_modules", "venv"])
def test_a_folder_of_programs_whose_part_is_a_link_to_a_home_is_refused(home: Path, part: str, target: str) -> None:
    agent = put(home / "work/bin/agent")
    link(home / "programs" / part, home / target)
    assert "holds what is not its own" in str(shows(home, agent.parent, programs=home / "programs"))


def test_a_folder_of_programs_may_lie_under_tmp_for_boxes_see_it_elsewhere(home: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        put(Path(folder) / "venv/pyvenv.cfg", "")
        put(Path(folder) / "venv/bin/agent", "#!/moved/venv/bin/python\n")
        link(Path(folder) / "venv/bin/python3", "/usr/bin/python3")
        link(Path(folder) / "venv/bin/python", "python3")
        found = find_program(AgentProgram(command=("agent",)), Path(folder))
        assert found.start == ("/opt/harness/venv/bin/python", "/opt/harness/venv/bin/agent")
        assert found.mounts == {"/opt/harness/venv": f"{folder}/venv"}


def test_packages_whose_folder_is_a_link_are_refused(home: Path) -> None:
    put(home / ".bin/agent")
    link(home / "work/node_modules", home)
    assert "a package of npm that is installed, got" in str(shows(home, home / "work/node_modules/.bin"))
    put(home / "agent.js")
    link(home / "other/lib/node_modules/pkg", home)
    link(home / "other/bin/agent", "../lib/node_modules/pkg/agent.js")
    assert "a package of npm that is installed, got" in str(shows(home, home / "other/bin"))


def test_a_program_of_a_global_package_does_not_show_the_others(home: Path) -> None:
    modules = home / ".npm-global/lib/node_modules"
    put(modules / "agent/cli.js"), put(modules / "private/code.js")
    link(home / ".npm-global/bin/agent", "../lib/node_modules/agent/cli.js")
    os.environ["PATH"] = f"{home}/.npm-global/bin:/bin"
    mounts = find_program(AgentProgram(command=("agent",)), Path("/none")).mounts
    assert set(mounts) == {str(modules / "agent"), str(home / ".npm-global/bin/agent")}


def test_a_folder_that_is_called_as_pnpm_s_is_not_mounted_whole(home: Path) -> None:
    put(home / ".pnpm/auth.json", "SECRET")
    agent = put(home / ".pnpm/agent")
    os.environ["PATH"] = f"{home}/.pnpm:/bin"
    assert dict(find_program(AgentProgram(command=("agent",)), Path("/none")).mounts) == {str(agent): str(agent)}


def test_links_in_a_ring_and_links_into_the_system_end(home: Path) -> None:
    link(home / "bin/one", "two")
    link(home / "bin/two", "one")
    assert "the program one, got none" in str(shows(home, home / "bin", "one"))
    link(home / "bin/agent", "/usr/bin/env")
    os.environ["PATH"] = f"{home}/bin:/bin"
    mounts = find_program(AgentProgram(command=("agent",)), Path("/none")).mounts
    assert arguments_of(mounts) == ["--symlink", "/usr/bin/env", str(home / "bin/agent")]


@pytest.mark.parametrize("own", ["/dev/shm", "/tmp"])
def test_folders_that_boxes_have_of_their_own_are_told(home: Path, own: str) -> None:
    with tempfile.TemporaryDirectory(dir=own) as folder:
        agent = put(Path(folder) / "bin/agent")
        assert "boxes have folders of their own at /tmp" in str(shows(home, agent.parent))


def test_a_home_that_is_reached_by_a_link_is_a_home(home: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        link(Path(folder) / "me", home)
        os.environ["HOME"] = f"{folder}/me"
        for path in (home, home / ".ssh", Path(folder) / "me", Path(folder) / "me/.config", Path(folder)):
            assert is_private(path)
        assert not is_private(home / "work")
