"""Runs in processes of their own, and the processes that such a run, or any process, has started."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from test_fleet_run import words


def started(recipe: Path, name: str, *settings: str) -> subprocess.Popen[str]:
    """A run whose temporary files and sockets, and those of its processes, stand beside its recipe."""
    command = (sys.executable, "-m", "sparring.cli.main", *words(recipe, name, *settings))
    environment = {**os.environ, "TMPDIR": str(recipe.parent)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


def processes_with(word: str, folder: Path) -> list[int]:
    """Process ids of the processes of such a run that have a word among their arguments; `folder`: that of its
    recipe."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                command = (entry / "cmdline").read_bytes().split(b"\0")
                environment = (entry / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if word.encode() in command and f"TMPDIR={folder}".encode() in environment:
                found.append(int(entry.name))
    return found


def processes_below(ancestor: int, wanted: Callable[[bytes], bool]) -> list[int]:
    """Process ids of those that a process and its children have started and whose command, with its words ended by
    zero bytes, is wanted."""
    parents, found = dict[int, int](), []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                if wanted((entry / "cmdline").read_bytes()):
                    found.append(int(entry.name))
            except OSError:
                continue

    def is_below(process: int) -> bool:
        while process in parents and process != ancestor:
            process = parents[process]
        return process == ancestor

    return [process for process in found if is_below(process)]
