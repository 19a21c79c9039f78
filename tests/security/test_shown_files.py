"""Commands that spoil what an agent program, or a shell, needs in a box of an image. Each failure is whose it is: of a
command, or of the image and what the world prepared in it (law 6)."""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from boxed_program import run_program
from image_files import SHELL, copy_programs, empty_image, open_folder, readable
from suite import short_of

from sparring.errors import PolicyFailure, SandboxError, SpoiltFile
from sparring.sandbox.bubblewrap import BubblewrapBoxes
from sparring.sandbox.config import SandboxConfig
from sparring.sandbox.handles import NoShell, ShellEnded
from sparring.sandbox.images.image import UnpackedImage
from sparring.types import BoxSpec

FOLDER = "/opt/harness/venv"
Work = Callable[["Shown"], Awaitable[Any]]


def with_a_shell(layer: Path, place: Path) -> None:
    copy_programs([*SHELL, "flock"], layer)


def with_a_link_in_the_way(layer: Path, place: Path) -> None:
    """At the path of the program's link, one to something else."""
    with_a_shell(layer, place)
    (folder := layer / str(place).lstrip("/")).mkdir(parents=True)
    (folder / "link").symlink_to("/bin/sh")


def without_a_shell(layer: Path, place: Path) -> None:
    copy_programs(["rm", "true"], layer)


def of_another_kind(layer: Path, place: Path) -> None:
    """Without /tmp and /proc, with links and a file at other folders that a box has of its own."""
    with_a_shell(layer, place)
    (layer / "tmp").rmdir()
    (layer / "agent").symlink_to("/etc")
    (layer / "box").symlink_to("/proc/1/root")
    (layer / "dev").write_text("no folder")


IMAGES = {one.__name__: one for one in (with_a_shell, with_a_link_in_the_way, without_a_shell, of_another_kind)}


class Shown:
    """Boxes of images in which a program's folder, a file of it and a link are shown.

    Args:
        folder: folder of the images, and of the file and the link, whose path is the same in the boxes.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.place = folder, folder / "program"
        (self.place / "venv").mkdir(parents=True)
        shutil.copy("/usr/bin/echo", self.place / "venv/agent")
        shutil.copy("/usr/bin/echo", self.place / "file")
        (self.place / "link").symlink_to("file")
        readable(self.place)
        mounts = {FOLDER: str(self.place / "venv")}
        mounts |= {str(self.place / name): str(self.place / name) for name in ("file", "link")}
        self.pool = BubblewrapBoxes(SandboxConfig(servers=1), mounts, self.image_of)

    def image_of(self, name: str) -> UnpackedImage:
        layer = self.folder / name / "layers/only"
        if not layer.exists():
            IMAGES[name](empty_image(self.folder / name), self.place)
            readable(self.folder / name)
        return UnpackedImage((layer,))

    async def box(self, image: Callable[..., None] = with_a_shell) -> Any:
        return await self.pool.take(BoxSpec(timeout_s=20.0, image=image.__name__))


@pytest.fixture(scope="module")
def run() -> Iterator[Callable[[Work], Any]]:
    with open_folder() as folder, asyncio.Runner() as runner:
        shown = Shown(folder)

        async def bounded(work: Work) -> Any:
            async with asyncio.timeout(60):
                return await work(shown)

        yield lambda work: runner.run(bounded(work))
        runner.run(shown.pool.close())


async def ran(box: Any, *argv: str) -> Any:
    """Run a program that asks nothing."""
    return await run_program(box, [*(argv or (f"{FOLDER}/agent", "ran"))], environment={"PATH": "/usr/bin"})


TRAPS = (
    "ln -s /proc /opt",
    "ln -s /dev /opt",
    "ln -s /dev/pts /opt",
    "mkdir -p $PLACE/file",
    "mkdir -p $PLACE; ln -s /bin/sh $PLACE/link",
    "mkdir -p $PLACE; echo x > $PLACE/link",
    f"mkdir -p $(dirname $PLACE); ln -s {FOLDER} $PLACE",
    "mkdir -p /opt/harness; echo x > /opt/harness/venv",
)


@pytest.mark.parametrize("trap", short_of(TRAPS, TRAPS[::3]))
def test_what_a_command_leaves_at_the_paths_is_the_policys_and_named(run: Any, trap: str) -> None:
    async def work(shown: Shown) -> None:
        box, place = await shown.box(), str(shown.place)
        text = trap.replace("$(dirname $PLACE)", str(shown.folder)).replace("$PLACE", place)
        assert (await box.exec(f"rm -rf /opt; {text}")).exit_code == 0
        for _ in range(2):
            with pytest.raises(SpoiltFile, match=f"'({FOLDER}|{place}/(file|link))'"):
                await ran(box)
        assert (await box.exec("echo on")).stdout == "on\n"
        await box.close()

    run(work)


def test_what_a_command_moved_or_runs_is_shown_again(run: Any) -> None:
    async def work(shown: Shown) -> list[str]:
        box, file, said = await shown.box(), shown.place / "file", []
        await box.exec(f"mkdir -p {file.parent}; cp /usr/bin/sh {file}")
        running = await box.start([str(file), "-c", "echo begun; sleep 1000"])
        while "begun" not in (await running.output()).stdout:
            pass
        said.append((await ran(box, str(file), "shown")).stdout)
        await box.exec(f"mv /opt/harness /opt/moved; mkdir -p {FOLDER}; cp /usr/bin/false {FOLDER}/agent")
        said += [(await ran(box)).stdout, (await ran(box, str(file.parent / "link"), "linked")).stdout]
        assert not running.ended
        await box.close()
        return said

    assert run(work) == ["shown\n", "ran\n", "linked\n"]


@pytest.mark.full
def test_a_tree_of_the_whole_box_is_its_own_files_alone(run: Any) -> None:
    async def work(shown: Shown) -> tuple[set[str], set[str]]:
        box = await shown.box()
        await ran(box)
        await box.exec("echo x > /opt/harness/own; echo x > own")
        found = set(await box.download("/", 1 << 30))
        kept = await box.fork(await box.snapshot())
        again = set(await kept.download("/", 1 << 30))
        for one in (kept, box):
            await one.close()
        return found, again

    for found in run(work):
        assert {"opt/harness/own", "box/own", "usr/bin/ls", "proc", FOLDER[1:]} <= found
        assert not {name for name in found if name.startswith(("proc/", f"{FOLDER[1:]}/"))}


@pytest.mark.full
def test_locks_on_a_programs_files_are_seen_by_other_boxes_which_is_said(run: Any) -> None:
    """All boxes are shown the same file: docs/limits.md. Where this test fails, that page can say less."""
    locks = f"exec 7< {FOLDER}/agent; flock -n 7 && echo locked && sleep 1000"

    async def work(shown: Shown) -> int:
        first, second = await shown.box(), await shown.box()
        for box in (first, second):
            await ran(box)
        holder = await first.start(locks)
        while "locked" not in (told := await holder.output()).stdout:
            assert told.end == "running", told
        refused = (await second.exec(locks)).exit_code
        for box in (first, second):
            await box.close()
        return int(refused)

    assert run(work) == 1


@pytest.mark.full
def test_a_command_that_changes_the_paths_meanwhile_is_the_policys_failure(run: Any) -> None:
    race = "while :; do rm -rf /opt; mkdir -p /opt/harness; mv /opt /opt2; rm -rf /opt2; done 2>/dev/null"

    async def work(shown: Shown) -> None:
        for _ in range(20):
            box = await shown.box()
            await box.start(race)
            for _ in range(3):
                with suppress(PolicyFailure):
                    assert (await ran(box)).exit_code in (0, 127)
            await box.close()

    run(work)


def test_what_the_image_or_the_world_has_at_the_paths_is_not_the_policys(run: Any) -> None:
    async def work(shown: Shown) -> None:
        image, prepared = await shown.box(with_a_link_in_the_way), await shown.box()
        await image.exec("true")
        await prepared.exec(f"mkdir -p {shown.place}; echo x > {shown.place}/link")
        await prepared.snapshot()
        fork = await prepared.fork(await prepared.snapshot())
        for box in (image, prepared, fork):
            await box.exec("touch /box/changed")
            with pytest.raises(FileExistsError, match=f"{shown.place}/link") as raised:
                await ran(box)
            assert not isinstance(raised.value, PolicyFailure)
            await box.close()

    run(work)


def test_a_program_begins_behind_a_snapshot_that_waits(run: Any) -> None:
    """Else the snapshot would wait for the program's end, and the box would be given up for its silence."""

    async def work(shown: Shown) -> tuple[set[str], str]:
        box = await shown.box()
        await box.exec("true")
        running = asyncio.create_task(box.exec("echo x > early; sleep 0.2"))
        while "early" not in await box.entries():
            pass
        waiting = asyncio.create_task(box.snapshot())
        for _ in range(20):  # until it has been asked for
            await asyncio.sleep(0)
        program = await ran(box, "sh", "-c", "echo x > late; echo ran")
        fork = await box.fork(await waiting)
        await running
        found = set(await fork.entries())
        for one in (fork, box):
            await one.close()
        return found, program.stdout

    assert run(work) == ({"early"}, "ran\n")


@pytest.mark.parametrize(
    "trap", short_of(["rm /bin/bash /bin/sh", "cp /bin/false /bin/bash"], ["rm /bin/bash /bin/sh"])
)
def test_a_shell_that_a_command_spoilt_is_the_policys(run: Any, trap: str) -> None:
    async def work(shown: Shown) -> None:
        box = await shown.box()
        await box.exec(trap)
        with pytest.raises(ShellEnded, match="spoilt"):
            await box.shell()
        await box.close()

    run(work)


@pytest.mark.full
def test_an_image_without_a_shell_is_not_the_policys(run: Any) -> None:
    async def work(shown: Shown) -> None:
        box = await shown.box(without_a_shell)
        await box.exec(["true"])
        await box.snapshot()
        fork = await box.fork(await box.snapshot())
        for one in (box, fork):
            await one.exec(["rm", "-rf", "/bin"])
            with pytest.raises(NoShell):
                await one.shell()
            await one.close()

    run(work)


@pytest.mark.full
def test_a_folder_that_goes_while_a_command_begins_there_is_missing(run: Any) -> None:
    async def work(shown: Shown) -> None:
        box = await shown.box()
        await box.start("while :; do mkdir folder; rmdir folder; done")
        for number in range(60):
            with suppress(FileNotFoundError):
                await (await box.shell(cwd="folder")).close() if number % 5 else None
                result = await box.exec(["echo", "on"], cwd="folder")
                assert (result.stdout, result.stderr) == ("on\n", "")
        await box.close()

    run(work)


@pytest.mark.full
def test_folders_of_the_box_replace_whatever_the_image_has_there(run: Any) -> None:
    async def work(shown: Shown) -> tuple[str, str]:
        box = await shown.box(of_another_kind)
        text = "touch /tmp/a /box/a /agent/a /dev/shm/a; ls -d /proc/self; ls /etc; head -c 1 /dev/zero | wc -c; pwd"
        said = (await ran(box, "sh", "-c", text)).stdout
        fork = await box.fork(await box.snapshot())
        again = (await fork.exec(text)).stdout
        for one in (fork, box):
            await one.close()
        return said, again

    expected = "/proc/self\ngroup\nhosts\npasswd\n1\n/box\n"
    assert run(work) == (expected, expected)


@contextmanager
def no_more_files(but: int = 0) -> Iterator[None]:
    """Leave this process no room for one more open file than so many."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with open("/dev/null") as next_file:
        number = next_file.fileno()
    resource.setrlimit(resource.RLIMIT_NOFILE, (number + but, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_run_without_room_for_a_programs_port_says_so(run: Any) -> None:
    """Nobody would serve the program, which would wait until its time is up."""

    async def work(shown: Shown) -> None:
        box, unopened = await shown.box(), await shown.box()
        await box.exec("true")
        with no_more_files():
            with pytest.raises(SandboxError, match="too many open files"):
                await ran(box)
            with pytest.raises(SandboxError, match="Too many open files"):
                await unopened.exec("true")
            with pytest.raises(SandboxError, match="no pipes for two programs"):
                await unopened.converse("1", "1")
        assert (await unopened.exec("echo on")).stdout == "on\n", "a place is free again"
        for one in (box, unopened):
            await one.close()

    run(work)


def test_a_server_that_cannot_start_keeps_no_file(run: Any) -> None:
    async def work(shown: Shown) -> None:
        boxes = BubblewrapBoxes(SandboxConfig(servers=1))
        before = len(os.listdir("/proc/self/fd"))
        for room in range(10):
            box = await boxes.take(BoxSpec())
            with no_more_files(but=room), pytest.raises(SandboxError):
                await box.exec("true")
            await box.close()
            assert len(os.listdir("/proc/self/fd")) == before, room
        await boxes.close()

    run(work)
