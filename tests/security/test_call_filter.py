"""The filter of system calls lets ordinary programs work, and answers to the rest as an older kernel would."""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from boxed_program import run_program
from image_files import open_folder

from sparring.sandbox.bubblewrap import BubblewrapBoxes
from sparring.sandbox.config import SandboxConfig
from sparring.sandbox.inner.filter import ALLOWED, CHECKED, IDLE, OWNERS, REFUSED, Rules, filter_program, numbers
from sparring.types import BoxSpec, ExecResult

CALL = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
def call(*arguments):
    answer = libc.syscall(*map(ctypes.c_long, arguments))
    print(ctypes.get_errno() if answer < 0 else 0)
"""
PACKAGES = ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "execnet", "xdist", "pygments")
SCRIPTS = {
    "git": "git init -q . && git config user.email a@b && git config user.name a && echo one > f && git add f && "
    "git commit -qm one && git clone -q . other && git -C other log --oneline | wc -l && git gc -q && git fsck",
    "bash": "set -e; f() { cat <(seq 3) | while read n; do echo $((n * 2)); done; }; f; sleep 5 & kill %1; "
    "wait %1 || true; timeout 5 sh -c 'trap \"echo trapped\" TERM; kill $$'; diff <(echo a) <(echo a)",
    "gcc": "printf '#include <stdio.h>\\n#include <pthread.h>\\nvoid *f(void *x) { return x; }\\nint main() { pthread_t t; "
    'pthread_create(&t, 0, f, 0); pthread_join(t, 0); puts("built"); }\\n\' > a.c && gcc -O1 -pthread a.c -o a && ./a',
    "node": "node -e \"const {Worker} = require('worker_threads'), {execSync} = require('child_process'), fs = require('fs');"
    "fs.watch('.').close(); console.log(execSync('echo child').toString().trim());"
    "new Worker('console.log(6 * 7)', {eval: true}).on('exit', () => fs.promises.readdir('.').then(n => console.log(n.length)))\"",
    "tmux": "tmux -f /dev/null new-session -d -x 80 -y 24 'echo in tmux > out; tmux wait-for -S done; sleep 60' && tmux wait-for done "
    "&& cat out; tmux kill-server 2>/dev/null; true",
}
SAID = {
    "git": "1",
    "bash": "2\n4\n6\ntrapped",
    "gcc": "built",
    "node": "child\n42\n0",
    "tmux": "in tmux",
}
PYTHON = """
import asyncio, concurrent.futures, multiprocessing, socket, sqlite3, subprocess, tempfile, threading, mmap, select
def square(x): return x * x
with multiprocessing.get_context("fork").Pool(2) as pool: print(pool.map(square, range(4)))
with concurrent.futures.ThreadPoolExecutor(2) as pool: print(list(pool.map(square, range(4))))
async def main():
    child = await asyncio.create_subprocess_exec("echo", "async", stdout=-1)
    print((await child.communicate())[0])
asyncio.run(main())
print(sqlite3.connect("data.db").execute("select 6 * 7").fetchone())
print(subprocess.run(["sh", "-c", "echo child"], capture_output=True).stdout)
with tempfile.NamedTemporaryFile() as file: mmap.mmap(file.fileno(), 0) if file.write(b"x" * 4096) and not file.flush() else 0
one, two = socket.socketpair()
socket.send_fds(one, [b"x"], [0])
print(len(socket.recv_fds(two, 1, 1)[1]))
"""


def in_programs_box(argv: list[str], mounts: dict[str, str] | None = None) -> ExecResult:
    async def work() -> ExecResult:
        boxes = BubblewrapBoxes(SandboxConfig(servers=1), mounts or {})
        spec = BoxSpec(timeout_s=60.0, memory_bytes=4 << 30, disk_bytes=256 << 20, processes=64, output_bytes=1 << 16)
        box = await boxes.take(spec)
        environment = {
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "HOME": "/agent",
            "TERM": "xterm",
            "PYTHONPATH": "/opt/tests",
        }

        try:
            return await run_program(box, argv, environment=environment)
        finally:
            await boxes.close()

    return asyncio.run(work())


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(name, marks=[pytest.mark.program(name), *([pytest.mark.full] if name != "git" else [])])
        for name in SCRIPTS
    ],
)
def test_a_program_works(program: str) -> None:
    result = in_programs_box(["bash", "-c", SCRIPTS[program]])
    assert result.exit_code == 0, result.stderr
    assert result.stdout.strip().startswith(SAID[program])


def test_python_works(in_box: Any) -> None:
    result = in_box(lambda box: box.exec(["python3", "-c", PYTHON]), memory_bytes=1 << 30, disk_bytes=64 << 20)
    assert result.stderr == ""
    assert result.stdout.splitlines() == [
        "[0, 1, 4, 9]",
        "[0, 1, 4, 9]",
        "b'async\\n'",
        "(42,)",
        "b'child\\n'",
        "1",
    ]


@pytest.fixture
def packages() -> Iterator[dict[str, str]]:
    """Mounts of pytest and its plugin for processes, which the boxes' user can read."""
    with open_folder() as folder:
        for name in PACKAGES:
            found = importlib.util.find_spec(name)
            assert found is not None and found.origin is not None
            shutil.copytree(Path(found.origin).parent, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(Path(str(found.origin)).parents[1] / "py.py", folder)
        for info in Path(str(found.origin)).parents[1].glob("pytest*.dist-info"):
            shutil.copytree(info, folder / info.name)
        yield {"/opt/tests": str(folder)}


@pytest.mark.full
def test_pytest_works_in_several_processes(packages: dict[str, str]) -> None:
    test = "def test_one(): pass\\ndef test_two(tmp_path): (tmp_path / 'f').write_text('x')\\ndef test_three(): assert 0\\n"
    script = f'printf "{test}" > test_it.py && python3 -m pytest -n 2 -q test_it.py -p no:cacheprovider'
    result = in_programs_box(["bash", "-c", script], packages)
    assert "1 failed, 2 passed" in result.stdout, result.stderr


def test_an_unknown_call_answers_as_an_older_kernel_would(in_box: Any) -> None:
    known = {number for calls in (ALLOWED, CHECKED, REFUSED, IDLE, OWNERS) for number in numbers(calls).values()}
    probes = {335, 336}  # uretprobe and uprobe of x86_64, which the kernel lets pass every filter and answers by SIGILL
    unknown = sorted(set(range(520)) - known - probes)
    assert len(unknown) > 100
    code = CALL + f"for number in {[*unknown, 2000]}: call(number, 0, 0, 0, 0, 0)"
    assert in_box(lambda box: box.python(code)).stdout == "38\n" * (len(unknown) + 1)


def test_calls_are_decided_by_their_arguments(in_box: Any) -> None:
    checked = numbers(CHECKED)
    calls = {
        f"{checked['clone']}, 0x20000 | 17": 1,  # CLONE_NEWNS
        f"{checked['prlimit64']}, 1, 7, 0, 0": 1,
        f"{checked['prlimit64']}, 0, 7, 0, 0": 0,
        f"{checked['socket']}, 2, 1, 262": 93,  # MPTCP
        f"{checked['socket']}, 2, 5, 132": 93,  # SCTP
        f"{checked['socket']}, 1, 1, 0": 0,
        f"{checked['socket']}, 1 | 1 << 32, 1, 0": 0,  # the kernel looks at the lower half
        f"{checked['socket']}, 16 | 1 << 32, 3, 0": 97,
        f"{checked['setsockopt']}, 3, 1, 26, 0, 0": 1,
        f"{checked['setsockopt']}, 3, 6, 31, 0, 0": 1,
        f"{checked['ioctl']}, 0, 0x5412, 0": 1,
        f"{checked['ioctl']}, 0, 0x5412 | 1 << 32, 0": 1,
        f"{checked['personality']}, 0x8": 1,
        f"{checked['personality']}, 0xffffffff": 0,
        f"{numbers(IDLE)['sync']}": 0,
        f"0x40000000 | {checked['socket']}, 1, 1, 0": 1,  # x32
    }
    code = CALL + "".join(f"call({call})\n" for call in calls)
    assert in_box(lambda box: box.python(code)).stdout.split() == [str(answer) for answer in calls.values()]


def test_each_call_is_in_one_list_and_every_program_is_valid() -> None:
    names = [entry.split(":")[0] for calls in (ALLOWED, CHECKED, REFUSED, IDLE, OWNERS) for entry in calls.split()]
    assert len(names) == len(set(names))
    for column in (1, 2):
        entries = [entry.split(":") for calls in (ALLOWED, CHECKED, REFUSED, IDLE, OWNERS) for entry in calls.split()]
        taken = [entry[column] for entry in entries if entry[column] != "-"]
        assert len(taken) == len(set(taken))
    for rules in map(Rules._make, itertools.product((False, True), repeat=3)):
        assert len(filter_program(rules)[0]) < 8 * 4096  # the kernel's limit, BPF_MAXINSNS
