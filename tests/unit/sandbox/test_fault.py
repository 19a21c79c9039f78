"""What a command leaves behind to spoil what comes after it: it holds nothing up, and is the policy's failure."""

from __future__ import annotations

import errno
from typing import Any

import pytest

from sparring.envs.base import Env
from sparring.errors import PolicyFailure, SpoiltFile
from sparring.rollout.guarded_env import GuardedEnv
from sparring.sandbox.bubblewrap import BubblewrapBoxes
from sparring.types import BoxSpec, Outcome, Task, Trajectory

SPEC = BoxSpec(timeout_s=5.0)
PARKED = """
import os, socket
os.write(1, b'said ' * 10)
for _ in range(30):
    a, b = socket.socketpair()
    socket.send_fds(a, [b'x'], [1, 2, a.fileno(), b.fileno()])
    a.close(), b.close()
os._exit(3)
"""
LEFT = {
    "a pipe": ("import os; os.mkfifo('answer.txt')", errno.ENXIO),
    "a link to a pipe": ("import os; os.mkfifo('pipe'); os.symlink('pipe', 'answer.txt')", errno.ENXIO),
    "a link to a device": ("import os; os.symlink('/dev/null', 'answer.txt')", errno.ENXIO),
    "a socket": ("import socket; socket.socket(socket.AF_UNIX).bind('answer.txt')", errno.ENXIO),
    "a folder": ("import os; os.mkdir('answer.txt')", errno.EISDIR),
    "a link to itself": ("import os; os.symlink('answer.txt', 'answer.txt')", errno.ELOOP),
    "a closed file": ("import os; open('answer.txt', 'w'); os.chmod('answer.txt', 0)", errno.EACCES),
}


class Reads(Env):
    """A world whose verdict lies in a file that the policy was to write."""

    def generate(self, random: Any) -> dict[str, Any]:
        return {"prompt": "Write answer.txt."}

    async def reward(self, completion: str, task: Task) -> float:
        assert self.box is not None
        return float(await self.box.read("answer.txt") == b"42")


def test_output_parked_in_sockets_does_not_block_a_box(bench: Any) -> None:
    """Sockets in flight in a ring keep the pipe open until the kernel looks for them. What was written before is not
    lost."""

    async def work(box: Any) -> Any:
        return await box.python(PARKED), await box.python("print(1)")

    result, after = bench.box(work, SPEC)
    assert (result.exit_code, result.stdout, result.timed_out) == (3, "said " * 10, False)
    assert after.stdout == "1\n"


@pytest.mark.parametrize("left", LEFT)
def test_a_spoilt_path_is_the_policys_failure(bench: Any, left: str) -> None:
    code, number = LEFT[left]

    async def work(box: Any) -> None:
        await box.python(code)
        for attempt in (box.read("answer.txt"), box.write("answer.txt", b"tests")):
            with pytest.raises(SpoiltFile) as spoilt:
                await attempt
            assert spoilt.value.errno == number
        env = GuardedEnv(Reads)
        await env.open(Task(id="t", env="e", messages=(), box=SPEC), box)
        outcome = Outcome(kind="completed", reason="answered")
        with pytest.raises(PolicyFailure):
            await env.score([Trajectory(id="r", task="t", role="policy", segments=(), outcome=outcome)])
        assert (await box.python("print('serves on')")).stdout == "serves on\n"

    bench.box(work, SPEC)


def test_a_closed_folder_and_a_full_disk_are_the_policys_failure(bench: Any) -> None:
    async def work(boxes: BubblewrapBoxes) -> None:
        box = await boxes.take(SPEC)
        await box.python("import os; open('file', 'w'); os.chmod('/box', 0o500)")
        for path, kind in (
            ("tests.py", PermissionError),
            ("file/tests.py", OSError),
            ("sub/tests.py", PermissionError),
        ):
            with pytest.raises(SpoiltFile) as spoilt:
                await box.write(path, b"tests")
            assert isinstance(spoilt.value, kind)
        full = await boxes.take(BoxSpec(timeout_s=5.0, disk_bytes=1 << 20))
        await full.python("open('all', 'wb').write(bytes(1 << 20))")
        with pytest.raises(SpoiltFile, match="No space left"):
            await full.write("tests.py", b"tests")

    bench.run(work)


def test_what_the_policy_left_for_another_box_is_its_failure(bench: Any) -> None:
    """Two files that fit alone, what the world had as a folder, a tree with a pipe, a tree larger than a disk."""

    async def work(box: Any) -> None:
        await box.upload({"folder/file": b"x", "file": b"y"})
        await box.snapshot()
        fresh = await box.fresh()  # taken before the policy's first command
        await box.exec("truncate -s 10M a b; rm -r folder; mv file folder")
        for paths, kind, number in (
            (("a", "b"), SpoiltFile, errno.ENOSPC),
            (("folder",), IsADirectoryError, errno.EISDIR),
            (("folder/file",), NotADirectoryError, errno.ENOTDIR),
        ):
            with pytest.raises(kind) as spoilt:
                await box.verifier(paths)
            assert isinstance(spoilt.value, SpoiltFile) and spoilt.value.errno == number
        with pytest.raises(SpoiltFile, match="more than"):
            await box.download()
        tree = await box.download(most_bytes=1 << 25)
        with pytest.raises(SpoiltFile, match="No space left"):
            await fresh.upload(tree)
        await box.exec("rm a b; mkfifo pipe")
        with pytest.raises(SpoiltFile, match="cannot be carried: 'pipe'"):
            await fresh.upload(await box.download())

    bench.box(work, SPEC)


def test_a_link_on_the_way_of_an_upload_is_the_policys(bench: Any) -> None:
    async def work(box: Any) -> None:
        await box.exec("ln -s /usr tests")
        for attempt in (
            box.write("tests/x.py", b""),
            box.upload({"tests/x.py": b""}),
            box.upload({"x.py": b""}, "tests"),
        ):
            with pytest.raises(SpoiltFile) as spoilt:
                await attempt
            assert spoilt.value.errno == errno.ELOOP

    bench.box(work, SPEC)


def test_a_missing_file_is_the_policys_once_it_may_act(bench: Any) -> None:
    async def work(box: Any) -> None:
        await GuardedEnv(Reads).open(Task(id="t", env="e", messages=(), box=SPEC), box)
        for attempt in (
            box.read("answer.txt"),
            box.entries("out"),
            box.exec("true", cwd="out"),
            (await box.fresh()).read("x"),
        ):
            with pytest.raises(FileNotFoundError) as missing:
                await attempt
            assert isinstance(missing.value, SpoiltFile)

    bench.box(work, SPEC)


def test_commands_go_on_in_a_folder_that_one_has_closed(bench: Any) -> None:
    async def work(box: Any) -> Any:
        await box.python("import os; os.chmod('/box', 0)")
        with pytest.raises(PermissionError) as closed:
            await box.exec("true", cwd="/box")
        assert isinstance(closed.value, SpoiltFile)
        told = await (await box.shell()).run("echo shell")
        looked = await box.exec("cat file")
        return (await box.python("print('python')")).stdout, told.stdout, looked.exit_code, looked.stderr

    assert bench.box(work, SPEC) == ("python\n", "shell\n", 1, "cat: file: Permission denied\n")


def test_an_error_that_no_command_can_cause_is_the_callers(bench: Any) -> None:
    async def work(box: Any) -> None:
        with pytest.raises(IsADirectoryError) as folder:
            await box.read("/box")
        with pytest.raises(FileNotFoundError) as missing:
            await box.read("missing")
        await box.python("1")
        with pytest.raises(OSError, match="Read-only") as closed:
            await box.write("/usr/new", b"x")
        assert not any(isinstance(error.value, PolicyFailure) for error in (folder, missing, closed))

    bench.box(work, SPEC)
