"""The server's process: it comes up or says why not, and does not outlive whoever started it."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from real_vllm import CONFIG
from served import turn

from sparring.engine.adapters.vllm import VllmEngine
from sparring.engine.adapters.vllm_server import VllmServer
from sparring.errors import EngineError, SparringError

pytestmark = pytest.mark.vllm

STARTS = """
import sys
from pathlib import Path
from real_vllm import real_vllm
server = real_vllm(Path(sys.argv[1]))
print(server.pid, server.folder, flush=True)
sys.stdin.read()
"""


def test_nothing_outlives_a_kill_of_whoever_started_it(weights):
    command = [sys.executable, "-c", STARTS, str(weights[0].path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        pid, folder = parent.stdout.readline().split()
        members = processes(int(pid))
        assert len(members) >= 3 and Path(folder).is_dir()
        shared = {file for member in members for file in shared_memory(member)}
        assert shared
        descriptors = watched(members)
        parent.send_signal(signal.SIGKILL)
    check_ended(descriptors)
    assert not Path(folder).exists() and not any(file.exists() for file in shared)


def test_a_server_that_dies_before_an_update_leaves_nobody_waiting(weights):
    async def scenario():
        server = VllmServer(weights[0].path, CONFIG)
        engine = VllmEngine(server, CONFIG, version=3)
        try:
            await engine.pull(weights[0].at(4))
            served = set(server.folder.glob("weights-*"))
            os.killpg(server.pid, signal.SIGKILL)
            with pytest.raises(SparringError):
                await engine.pull(weights[1].at(5))
            assert set(server.folder.glob("weights-*")) == served
            with pytest.raises(EngineError):
                await engine.generate(turn())
        finally:
            await engine.close()

    asyncio.run(scenario())


def processes(group: int) -> list[int]:
    """Of a process group, as /proc has them."""
    return [process for process, fields in _processes() if int(fields[2]) == group]


def shared_memory(process: int) -> list[Path]:
    """Segments that a process shares with others by multiprocessing."""
    lines = Path(f"/proc/{process}/maps").read_text().splitlines()
    return [Path(line.split()[-1]) for line in lines if "/dev/shm/psm_" in line]


def children(parent: int) -> list[int]:
    """Of a process."""
    return [process for process, fields in _processes() if int(fields[1]) == parent]


def _processes() -> list[tuple[int, list[str]]]:
    """Living ones, with the fields of /proc/PID/stat behind the name."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has just ended
        if fields[0] != "Z":
            found.append((int(stat.parent.name), fields))
    return found


def watched(members: list[int]) -> list[int]:
    """Descriptors that tell the end of processes."""
    return [os.pidfd_open(member) for member in members]


def check_ended(descriptors: list[int]) -> None:
    """Check that processes have ended, or do so within a minute."""
    for descriptor in descriptors:  # readable when the process has ended
        ready, _, _ = select.select([descriptor], [], [], 60.0)
        assert ready, "a process of the server is still there"
        os.close(descriptor)


def test_what_does_not_come_up_says_why(weights):
    config = msgspec.structs.replace(CONFIG, vllm=msgspec.structs.replace(CONFIG.vllm, arguments=("--no-such-flag",)))
    with pytest.raises(EngineError, match=r"got exit status 2; the end of its log:\n(.*\n)*.*--no-such-flag"):
        VllmServer(weights[0].path, config)


def test_what_takes_too_long_is_ended(weights):
    config = msgspec.structs.replace(CONFIG, vllm=msgspec.structs.replace(CONFIG.vllm, start_timeout_s=0.5))
    with pytest.raises(EngineError, match="raise engine.vllm.start_timeout_s"):
        VllmServer(weights[0].path, config)
