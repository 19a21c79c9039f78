"""Processes of a box, as pid 1 sees them in /proc, and their end. Standard library only, for Python >= 3.9."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Iterator

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
PATIENCE_S = 2.0


def parents() -> dict[int, int]:
    """Return the parent of every process of the box."""
    return {pid: int(text.rpartition(b")")[2].split()[1]) for pid, text in _each("stat")}


def _each(name: str) -> Iterator[tuple[int, bytes]]:
    """Yield every process of the box with the content of its file by this name in /proc."""
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/{name}", "rb") as file:
                    yield int(entry), file.read()
            except OSError:
                pass  # it has just ended


def below(roots: Iterable[int], tree: dict[int, int]) -> set[int]:
    """Return every process under `roots`, without these."""
    children: dict[int, list[int]] = {}
    for pid, parent in tree.items():
        children.setdefault(parent, []).append(pid)
    found: set[int] = set()
    waiting = list(roots)
    while waiting:
        for pid in children.get(waiting.pop(), ()):
            if pid not in found:
                found.add(pid)
                waiting.append(pid)
    return found


def signal_each(pids: Iterable[int], number: int) -> None:
    """Send a signal to processes, some of which may have ended."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass


def end_all(spared: Iterable[int] = (), only: int | None = None) -> None:
    """End processes of the box until none is left. Called as pid 1.

    Args:
        spared: reapers that live on, with all processes below them. If there are none, kill(-1) reaches all processes
            at once, even while one forks. Otherwise processes are stopped until no new one appears, and then killed. If
            they do not end within `PATIENCE_S`, all processes are killed, also the spared ones.
        only: reaper that alone is to end, with all processes below it.
    """
    spared, until = set(spared), time.monotonic() + PATIENCE_S
    while (spared or only) and (doomed := _stopped(spared, only, until)):
        signal_each(doomed, signal.SIGKILL)
        for pid in doomed:
            _reap(pid)
        if time.monotonic() > until:
            spared, only = set(), None
    while not spared and not only:
        signal_each((-1,), signal.SIGKILL)
        if not _reap(-1):
            return


def _stopped(spared: set[int], only: int | None, until: float) -> set[int]:
    """Stop all processes that have to end, and return them. At the time `until`, return those found so far: a spared
    process may wake the others again and again."""
    stopped: set[int] = set()
    while True:
        tree = parents()
        doomed = (
            (below({only}, tree) | {only} & tree.keys()) if only else tree.keys() - {1} - spared - below(spared, tree)
        )
        fresh = doomed - stopped
        if not fresh or time.monotonic() > until:
            return stopped | fresh
        signal_each(fresh, signal.SIGSTOP)
        stopped |= fresh


def _reap(pid: int) -> bool:
    """Wait for a killed child; return False if there is no such child. A grandchild becomes a child of pid 1 when its
    parent has ended."""
    try:
        os.waitpid(pid, 0)
    except ChildProcessError:
        return False
    return True


def reap_orphans(but: int) -> None:
    """Reap ended children of this process, up to the process `but`, whose `Run` reaps it."""
    try:
        while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if ended.si_pid == but:
                return
            os.waitpid(ended.si_pid, 0)
    except ChildProcessError:
        pass


def resident_bytes() -> dict[int, int]:
    """Return the bytes that each process of the box holds, without what it shares with the warm interpreter (pid 1)."""
    resident = {pid: int(text.split()[1]) * PAGE_BYTES for pid, text in _each("statm")}
    base = resident.pop(1, 0)
    return {pid: max(0, value - base) for pid, value in resident.items()}


def command_lines(but: Iterable[int]) -> list[str]:
    """Return the command line of each process of the box except pid 1 and `but`; of a process without one, its name."""
    found, own = [], _line_of(1)
    for pid in sorted({int(entry) for entry in os.listdir("/proc") if entry.isdigit()} - {1, *but}):
        try:
            line = _line_of(pid)
            with open(f"/proc/{pid}/comm", "rb") as file:
                name = file.read().strip()
            found.append((name if line in (b"", own) else line).decode("utf-8", "replace"))
        except OSError:
            pass  # it has just ended
    return found


def _line_of(pid: int) -> bytes:
    with open(f"/proc/{pid}/cmdline", "rb") as file:
        return file.read(4096).replace(b"\0", b" ").strip()


def own_bytes() -> int:
    """Return the bytes that this process holds, which each command shares when it starts."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * PAGE_BYTES
