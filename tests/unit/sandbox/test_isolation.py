"""What code in a box cannot see or do. Each test first shows, where it can, that the thing exists outside."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from sparring.sandbox.bubblewrap import BubblewrapBoxes
from sparring.sandbox.inner.filter import CHECKED, REFUSED, numbers
from sparring.sandbox.server import ENVIRONMENT
from sparring.types import BoxSpec

SPEC = BoxSpec(timeout_s=20.0)
TRY = """
import ctypes, os, socket, sys
libc = ctypes.CDLL(None, use_errno=True)
def attempt(what):
    try:
        print(what())
    except OSError as error:
        print(type(error).__name__)
def call(*arguments):
    if libc.syscall(*arguments) < 0:
        raise OSError(ctypes.get_errno(), "")
    return "done"
"""


def test_no_network(bench: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        socket.create_connection(("127.0.0.1", port)).close()
        listener.accept()[0].close()
        code = f"attempt(lambda: socket.create_connection(('127.0.0.1', {port}), timeout=5))"
        assert bench.python(TRY + code).stdout == "OSError\n"
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()


def test_no_network_devices_but_a_dead_loopback(bench: Any) -> None:
    code = "for number in range(1, 4): attempt(lambda: socket.if_indextoname(number))"
    assert bench.python(TRY + code).stdout == "lo\nOSError\nOSError\n"
    code = "attempt(lambda: socket.create_connection(('127.0.0.1', 9), timeout=5))"
    assert bench.python(TRY + code).stdout == "OSError\n"


def test_abstract_sockets_do_not_cross_boxes(bench: Any) -> None:
    async def work(boxes: BubblewrapBoxes) -> str:
        one, two = await boxes.take(SPEC), await boxes.take(SPEC)
        ours = "import socket, sys\ns = socket.socket(socket.AF_UNIX)\ns.bind('\\0name')\ns.listen()\ninput()"
        listening = asyncio.create_task(one.exec(["sh", "-c", f'sleep 3600 | python3 -c "{ours}"'], timeout_s=40.0))
        code = "attempt(lambda: socket.socket(socket.AF_UNIX).connect('\\0name'))"
        answers = [(await two.python(TRY + code)).stdout for _ in range(20)]
        listening.cancel()
        return "".join(answers)

    assert bench.run(work) == "ConnectionRefusedError\n" * 20


def test_no_host_files(bench: Any, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("42")
    paths = [
        secret,
        Path(__file__),
        Path.home(),
        Path("/etc/shadow"),
        Path("/etc/hostname"),
        Path("/home"),
        Path("/root"),
    ]
    result = bench.python(f"import os\nfor path in {[str(path) for path in paths]}: print(os.path.exists(path))")
    assert secret.read_text() == "42"
    assert result.stdout == "False\n" * len(paths)


def test_the_root_holds_the_system_s_programs_and_nothing_else(bench: Any) -> None:
    names = set(bench.python("import os; print(*os.listdir('/'))").stdout.split())
    prefix = Path(sys.base_prefix).parts[1]
    assert names - {prefix} <= {
        "usr",
        "bin",
        "sbin",
        "lib",
        "lib32",
        "lib64",
        "etc",
        "dev",
        "proc",
        "box",
        "tmp",
        "mnt",
    }
    settings = {"alternatives", "ld.so.cache", "passwd", "group", "hosts"}
    assert set(bench.python("import os; print(*os.listdir('/etc'))").stdout.split()) <= settings


def test_the_user_and_the_host_have_names(bench: Any) -> None:
    code = "import os, pwd, socket; print(pwd.getpwuid(os.getuid())[0], *sorted(user[0] for user in pwd.getpwall()))"
    names = "for name in ('localhost', socket.gethostname()): print(socket.getaddrinfo(name, 80)[0][4])"
    assert bench.python(f"{code}\n{names}").stdout == "agent agent root\n" + "('127.0.0.1', 80)\n" * 2


def test_no_environment_of_the_parent(bench: Any) -> None:
    assert "PATH" in os.environ
    assert eval(bench.python("import os; print(dict(os.environ))").stdout) == ENVIRONMENT | {"PWD": "/box"}


def test_nothing_outside_the_box_can_be_written(bench: Any) -> None:
    paths = [
        "/new",
        "/usr/new",
        "/etc/new",
        "/dev/new",
        "/bin/new",
        "/proc/new",
        "/proc/1/oom_score_adj",
        "/etc/ld.so.cache",
    ]
    code = f"for path in {paths}: attempt(lambda: open(path, 'w').write('x'))"
    answers = bench.python(TRY + code).stdout.split()
    assert len(answers) == len(paths)
    assert set(answers) <= {"OSError", "PermissionError", "FileNotFoundError"}


def test_only_the_box_s_own_folders_can_be_written(bench: Any) -> None:
    code = "for path in ('/box/f', '/tmp/f', '/dev/shm/f'): print(open(path, 'w').write('x'))"
    assert bench.python(code).stdout == "1\n" * 3
    assert bench.python("import os; print(os.listdir('/tmp'), os.listdir('/dev/shm'))").stdout == "[] []\n"


def test_another_box_s_files_and_processes_are_invisible(bench: Any) -> None:
    async def work(boxes: BubblewrapBoxes) -> str:
        one, two = await boxes.take(SPEC), await boxes.take(SPEC)
        await one.write("secret", b"mine")
        busy = asyncio.create_task(one.exec(["sleep", "3600"], timeout_s=40.0))
        code = (
            "import os\npids = [n for n in os.listdir('/proc') if n.isdigit()]\n"
            "print(os.path.exists('/box/secret'), pids == ['1', str(os.getpid())])\n"
            "print([name for _, _, names in os.walk('/mnt') for name in names])"
        )
        answers = [(await two.python(code)).stdout for _ in range(10)]
        busy.cancel()
        return "".join(answers)

    assert bench.run(work) == "False True\n[]\n" * 10


def test_no_file_descriptors_but_the_standard_three(bench: Any) -> None:
    code = "import os; print([n for n in os.listdir('/proc/self/fd') if os.path.exists(f'/proc/self/fd/{n}')])"
    assert bench.python(code).stdout == "['0', '1', '2']\n"
    code = "import os\nprint(*[os.readlink(f'/proc/self/fd/{n}').split(':')[0] for n in (0, 1, 2)])"
    assert bench.python(code).stdout == "pipe pipe pipe\n"

    async def work(boxes: BubblewrapBoxes) -> str:
        return (await (await boxes.take(SPEC)).exec(["sh", "-c", "ls /proc/$$/fd"])).stdout

    assert bench.run(work).split() == ["0", "1", "2"]


def test_the_box_s_own_process_cannot_be_touched(bench: Any) -> None:
    code = TRY + (
        "import resource, signal\n"
        "for number in range(1, 65):\n"
        "    try: os.kill(1, number)\n"
        "    except OSError as error: print(number, error)\n"
        "for name in ('mem', 'environ', 'fd/3', 'fd/0', 'cwd/x', 'maps'):\n"
        "    attempt(lambda: open(f'/proc/1/{name}', 'rb').read(1))\n"
        "attempt(lambda: resource.prlimit(1, resource.RLIMIT_NOFILE, (3, 3)))\n"
        "attempt(lambda: os.setpriority(os.PRIO_PROCESS, 1, 19))\n"
        "attempt(lambda: os.sched_setaffinity(1, {0}))\n"
        "attempt(lambda: os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0)))\n"
        "attempt(lambda: os.pidfd_open(1) and 0)\n"
    )
    result = bench.python(code, "print('alive')")
    assert result.stdout == "alive\n"
    lines = bench.python(code).stdout.splitlines()
    assert lines == ["PermissionError"] * 10 + ["0"]


def test_refused_system_calls_fail(bench: Any) -> None:
    refused = numbers(REFUSED).values()
    calls = [f"attempt(lambda: call({number}, 0, 0, 0, 0, 0))" for number in refused]
    assert bench.python("\n".join([TRY, *calls])).stdout == "PermissionError\n" * len(refused)
    new_user = 0x10000000 | 17  # CLONE_NEWUSER | SIGCHLD
    clone = numbers(CHECKED)["clone"]
    assert bench.python(TRY + f"attempt(lambda: call({clone}, {new_user}, 0, 0, 0, 0))").stdout == "PermissionError\n"
    assert bench.python(TRY + "attempt(lambda: os.chroot('/box'))").stdout == "PermissionError\n"
    assert bench.python(TRY + "print(libc.getpid() == os.getpid())").stdout == "True\n"


def test_no_capability_and_none_to_gain(bench: Any) -> None:
    code = "print([line.split()[1] for line in open('/proc/self/status') if line.startswith(('Cap', 'NoNewPrivs', 'Seccomp:'))])"
    zero = "0" * 16
    assert eval(bench.python(code).stdout) == [zero, zero, zero, zero, zero, "1", "2"]


def test_memory_holds_nothing_of_other_boxes(bench: Any) -> None:
    needle = "needle-5af1"
    code = (
        "word, found = bytes(reversed(b'1fa5-eldeen')), 0\n"
        "import re\n"
        "for line in open('/proc/self/maps'):\n"
        "    start, end, mode = re.match(r'(\\w+)-(\\w+) (....)', line).groups()\n"
        "    if mode[:2] == 'rw':\n"
        "        with open('/proc/self/mem', 'rb') as memory:\n"
        "            memory.seek(int(start, 16))\n"
        "            try: found += memory.read(int(end, 16) - int(start, 16)).count(word)\n"
        "            except OSError: pass\n"
        "print(found)"
    )
    before = int(bench.python(code).stdout)  # the word that it looks for
    assert int(bench.python(f"x = '{needle}'\n{code}").stdout) > before  # so it finds what there is
    for _ in range(4):
        bench.python(f"# {needle}\n" * 1000 + f"x = ['{needle}' + str(n) for n in range(1000)]")
        assert int(bench.python(code).stdout) == before


def test_a_link_to_the_host_leads_nowhere(bench: Any, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("42")

    async def work(box: Any) -> None:
        await box.python(f"import os; os.symlink({str(secret)!r}, 'link'); os.symlink('/proc/1/environ', 'other')")
        with pytest.raises(FileNotFoundError):
            await box.read("link")
        with pytest.raises(PermissionError):
            await box.read("other")

    bench.box(work)
