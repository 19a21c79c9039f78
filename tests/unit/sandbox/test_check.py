"""Preflight refuses machines that cannot make boxes, and says what to do."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from image_files import open_folder
from refusals import refused_at

from sparring.errors import BadInput
from sparring.sandbox.check import check_sandbox
from sparring.sandbox.config import SandboxConfig


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that every user can enter, for bubblewrap does not run as root, outside the boxes' own /tmp."""
    with open_folder() as path:
        yield path


def failing(folder: Path, message: str) -> SandboxConfig:
    """A program that fails as bubblewrap does."""
    program = folder / "bwrap"
    program.write_text(f"#!/bin/sh\necho '{message}' >&2\nexit 1\n")
    program.chmod(0o755)
    return SandboxConfig(bwrap=str(program))


def test_a_capable_machine_passes_also_inside_an_event_loop() -> None:
    check_sandbox()

    async def main() -> None:
        check_sandbox(SandboxConfig(servers=1))

    asyncio.run(main())


def test_no_bubblewrap() -> None:
    with refused_at("sandbox.bwrap", "no program 'no-such'"):
        check_sandbox(SandboxConfig(bwrap="no-such"))


def test_a_disabled_sandbox_is_not_checked() -> None:
    check_sandbox(SandboxConfig(enabled=False, bwrap="no-such"))


@pytest.mark.parametrize(
    "message",
    [
        "bwrap: setting up uid map: Permission denied",
        "bwrap: No permissions to create new namespace, likely because the kernel does not allow non-privileged user namespaces.",
        "bwrap: Creating new namespace failed: Operation not permitted",
        "bwrap: Creating new namespace failed: nesting depth or /proc/sys/user/max_*_namespaces exceeded (ENOSPC)",
        "bwrap: loopback: Failed RTM_NEWADDR: Operation not permitted",
    ],
)
def test_user_namespaces_blocked(folder: Path, message: str) -> None:
    with pytest.raises(BadInput, match="may make user namespaces, got .*(bwrap: .*); do: .*userns"):
        check_sandbox(failing(folder, message))


def test_a_program_that_is_not_bubblewrap(folder: Path) -> None:
    with pytest.raises(BadInput, match="expected a box"):
        check_sandbox(failing(folder, "what is this"))


def test_no_interpreter(folder: Path) -> None:
    with refused_at("sandbox.python", "no file"):
        check_sandbox(SandboxConfig(python="/no/python"))
    unreadable = folder / "bin" / "python3"
    unreadable.parent.mkdir()
    unreadable.write_text("")
    with refused_at("sandbox.python", "an interpreter that any user"):
        check_sandbox(SandboxConfig(python=str(unreadable)))


def test_the_config_refuses_what_makes_no_sense() -> None:
    for bad in ({"servers": -1}, {"concurrency": -1}, {"starting": 0}, {"grace_s": 0.0}, {"python": "python3"}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            SandboxConfig(**bad)


def test_a_private_interpreter_outside_usr_is_bound_read_only(folder: Path) -> None:
    """A prefix of its own, as pyenv or uv make them, stands in for a machine without a system Python."""
    prefix = folder / "prefix"
    (prefix / "bin").mkdir(parents=True)
    system = os.path.realpath("/usr/bin/python3")
    library = Path("/usr/lib") / Path(system).name
    shutil.copy(system, prefix / "bin" / "python3")
    unneeded = shutil.ignore_patterns("__pycache__", "test", "config-*", "*dist*")
    shutil.copytree(library, prefix / "lib" / library.name, ignore=unneeded)
    check_sandbox(SandboxConfig(python=str(prefix / "bin" / "python3"), servers=1))
