"""Where Sparring is root, boxes and layers belong to an id that nobody has: no other process reaches them."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from boxed_program import descendants
from image_files import SHELL, copy_programs, empty_image, open_folder, readable, save_archive

from sparring.errors import BadInput
from sparring.sandbox.bubblewrap import BubblewrapBoxes
from sparring.sandbox.check import check_sandbox
from sparring.sandbox.config import BOX_USER, OVERFLOW_USER, SandboxConfig
from sparring.sandbox.doctor import examine
from sparring.sandbox.images.store import FOLDERS, ImageStore
from sparring.sandbox.server import find_python
from sparring.types import BoxSpec

pytestmark = pytest.mark.root

ATTACK = """
import ctypes, os, subprocess, sys
servers, layer = sys.argv[1].split(), sys.argv[2]
def reached(what, work):
    try:
        work()
        print(what)
    except OSError:
        pass
def enter(pid, kind):
    if ctypes.CDLL(None).setns(os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY), 0) < 0:
        raise OSError
def attach(pid):
    if ctypes.CDLL(None).ptrace(16, int(pid), None, None) < 0:  # PTRACE_ATTACH
        raise OSError
for name in ("etc/passwd", "new"):
    reached(name, lambda: open(f"{layer}/{name}", "a"))
reached("layer", lambda: os.listdir(layer))
for pid in servers:
    for name in ("environ", "maps", "mem", "stack", "io"):
        reached(name, lambda: open(f"/proc/{pid}/{name}", "rb").read(1))
    for name in ("root", "cwd", "fd"):
        reached(name, lambda: os.listdir(f"/proc/{pid}/{name}"))
    reached("files", lambda: open(f"/proc/{pid}/root/box/seen", "w"))
    for kind in ("user", "mnt", "net", "pid"):
        reached(kind, lambda: enter(pid, kind))
    reached("ptrace", lambda: attach(pid))
    reached("signal", lambda: os.kill(int(pid), 0))
    if subprocess.run(["nsenter", "-t", pid, "-U", "-m", "true"], capture_output=True).returncode == 0:
        print("nsenter")
"""
"""Prints each thing of these processes and of this layer that the one who runs it can reach."""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ImageStore]:
    """A store with an image of a shell."""
    layer = empty_image(tmp_path / "parts")
    copy_programs([*SHELL, "chown"], layer)
    readable(tmp_path / "parts")
    save_archive(layer, tmp_path / "image.tar")
    with open_folder() as folder:
        store = ImageStore(folder / "images")
        store.pull(tmp_path / "image.tar", "shell")
        yield store


def test_no_other_user_reaches_boxes_or_layers(store: ImageStore) -> None:
    os.environ["SPARRING_TEST_KEY"] = "secret"

    async def work() -> None:
        others = descendants(os.getpid())
        boxes = BubblewrapBoxes(SandboxConfig(servers=1), image_of=store.unpacked)
        box = await boxes.take(BoxSpec(image="shell", user=0, timeout_s=20.0))
        await box.start("sleep 60")
        changed = await box.exec("echo x >> /etc/passwd; chown 5:5 /etc/passwd; echo $?; tail -n 1 /etc/passwd")
        assert changed.stdout == "0\nx\n", "in its box an image's files can be changed"
        below = [pid for pid in descendants(os.getpid()) if pid not in others]
        assert len(below) >= 4, "bubblewrap, the server, the box and its command"
        for pid in below:
            assert b"secret" not in Path(f"/proc/{pid}/environ").read_bytes(), "the run's environment stays its own"
            assert f"Uid:\t{BOX_USER}\t" in Path(f"/proc/{pid}/status").read_text()
        layer = store.unpacked("shell").layers[0]
        assert {path.lstat().st_uid for path in (layer, *layer.rglob("*"))} == {BOX_USER}
        line = [find_python(SandboxConfig()), "-I", "-c", ATTACK, " ".join(map(str, below)), str(layer)]
        for user in (OVERFLOW_USER, 1, BOX_USER + 1, BOX_USER):
            done = subprocess.run(line, user=user, group=user, extra_groups=[], capture_output=True, text=True, cwd="/")
            reached = set(done.stdout.split())
            assert (
                {"environ", "root", "user", "ptrace", "etc/passwd", "layer"} <= reached
                if user == BOX_USER
                else not reached
            )
        await boxes.close()

    try:
        asyncio.run(work())
    finally:
        del os.environ["SPARRING_TEST_KEY"]


def test_only_root_and_the_boxes_enter_a_store(store: ImageStore) -> None:
    kind = store.folder.stat()
    assert (kind.st_uid, kind.st_gid, kind.st_mode & 0o777) == (0, BOX_USER, 0o710)
    folders = [store.folder / name for name in FOLDERS]
    done = subprocess.run(
        ["ls", *folders], user=OVERFLOW_USER, group=OVERFLOW_USER, extra_groups=[], capture_output=True
    )
    assert (done.stdout, done.stderr.count(b"Permission denied")) == (b"", len(folders))


@pytest.mark.full
def test_a_store_of_another_user_is_refused(store: ImageStore, tmp_path: Path) -> None:
    other = ImageStore(store.folder, BOX_USER + 1)
    with pytest.raises(BadInput, match=f"the boxes' group {BOX_USER + 1} can enter, got one of user 0 and group"):
        other.unpacked("shell")
    with pytest.raises(BadInput, match="remove it and pull its images again"):
        other.pull(tmp_path / "image.tar", "shell")
    store.folder.chmod(0o755)
    with pytest.raises(BadInput, match="mode 0755"):
        store.unpacked("shell")


def test_a_store_where_another_user_could_swap_folders_is_refused(store: ImageStore, tmp_path: Path) -> None:
    """Root gives folders to the boxes' group there: what is behind a link must not be one of the machine's."""
    place = store.folder.parent / "place"
    (place / "sparring").mkdir(parents=True)
    for user, mode in ((OVERFLOW_USER, 0o755), (0, 0o777)):
        os.chown(place, user, 0)
        place.chmod(mode)
        other = ImageStore(place / "sparring" / "images")
        with pytest.raises(BadInput, match=f"only root can change, got {place} of user {user}, mode 0{mode:o}"):
            other.pull(tmp_path / "image.tar", "shell")
        assert not list((place / "sparring").iterdir())
    place.chmod(0o1777)
    other.pull(tmp_path / "image.tar", "shell")


@pytest.mark.full
def test_a_key_names_another_user(store: ImageStore, tmp_path: Path) -> None:
    """Its boxes change files of an image that was pulled for it, and cannot enter another one's."""
    other = ImageStore(store.folder.parent / "other", BOX_USER + 1)
    other.pull(tmp_path / "image.tar", "shell")

    async def work() -> None:
        boxes = BubblewrapBoxes(SandboxConfig(servers=1, user=BOX_USER + 1), image_of=other.unpacked)
        box = await boxes.take(BoxSpec(image="shell", user=0, timeout_s=20.0))
        assert (await box.exec("echo x >> /etc/passwd; tail -n 1 /etc/passwd")).stdout == "x\n"
        boxes.image_of = store.unpacked
        with pytest.raises(BadInput, match=f"user {BOX_USER + 1}, whom boxes run as, cannot read .* .mode 0710."):
            await boxes.take(BoxSpec(image="shell"))
        await boxes.close()

    asyncio.run(work())


def test_an_id_that_somebody_has_is_refused() -> None:
    for user in (0, OVERFLOW_USER, -1, 2**32 - 1):
        with pytest.raises(ValueError, match="an id that nobody has"):
            SandboxConfig(user=user)
    with pytest.raises(BadInput, match=r"sandbox.user: expected an id that nobody has, .* got 1, that of daemon"):
        check_sandbox(SandboxConfig(user=1))
    (finding,) = examine(SandboxConfig(user=1))
    assert not finding.holds and "sandbox.user" in finding.cost


@pytest.mark.parametrize("file", (pytest.param("subuid", marks=pytest.mark.full), "subgid"))
def test_an_id_that_somebody_s_containers_may_take_is_refused(tmp_path: Path, file: str) -> None:
    """In a mount namespace of its own, with files of ours over the machine's."""
    for name in ("subuid", "subgid"):
        last = BOX_USER if name == file else BOX_USER - 1
        (tmp_path / name).write_text(f"\n# bob:1:99999\nalice:{BOX_USER + 1}:65536\nbob:{last - 9}:10\n")
    shell = f'mount -t overlay -o lowerdir={tmp_path}:/etc overlay /etc && exec "$@"'
    text = "from sparring.sandbox.mounts import check_box_user; import sys; check_box_user(int(sys.argv[1]))"
    line = ["unshare", "-m", "sh", "-c", shell, "sh", sys.executable, "-c", text]
    lent, free = (
        subprocess.run([*line, str(user)], capture_output=True, text=True) for user in (BOX_USER, BOX_USER - 20)
    )
    assert f"got {BOX_USER}, which /etc/{file} lends to bob" in lent.stderr
    assert (free.returncode, free.stderr) == (0, "")


def test_an_id_that_something_runs_as_is_refused() -> None:
    config = SandboxConfig(user=BOX_USER + 2)
    with subprocess.Popen(["sleep", "60"], user=config.user, group=config.user, extra_groups=[]) as other:
        with pytest.raises(BadInput, match=f"{config.user}, whom process {other.pid} runs as"):
            check_sandbox(config)
        other.kill()
    check_sandbox(config)


def test_boxes_of_another_run_are_nobody_elses() -> None:
    async def work() -> None:
        boxes = BubblewrapBoxes(SandboxConfig(servers=1))
        box = await boxes.take(BoxSpec(timeout_s=20.0))
        await box.start("sleep 60")
        await asyncio.to_thread(check_sandbox)
        await boxes.close()

    asyncio.run(work())
