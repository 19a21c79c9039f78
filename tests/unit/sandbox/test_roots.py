"""Roots of boxes: an image's layers, the host as an overlay, and who one is there; as root and as an ordinary user."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from image import build

from sparring.errors import BadInput
from sparring.sandbox.bubblewrap import BubblewrapBoxes
from sparring.sandbox.config import SandboxConfig
from sparring.sandbox.images.image import ImageConfig, UnpackedImage
from sparring.types import BoxSpec

ORDINARY = 12345
USERS = ("here", "ordinary") if os.geteuid() == 0 else ("here",)
SHELL = {
    "programs are the image's": ("echo $(ls /usr); id -u; id -un", "bin\n0\nroot\n"),
    "the highest layer counts, and hides": ("cat /etc/motd; ls /etc", "upper\ngroup\nhosts\nmotd\npasswd\n"),
    "nothing of the host is there": ("ls -d /mnt /layers /usr/share /etc/alternatives 2>/dev/null; ls /", "LISTED"),
    "every folder can be written": (
        "touch /new /etc/new /usr/bin/new && rm /etc/motd && ls /etc",
        "group\nhosts\nnew\npasswd\n",
    ),
    "the host has a name where the image gives it none": ("cat /etc/hosts", "127.0.0.1 localhost box\n"),
    "the box reaches itself": (
        "bash -c 'echo > /dev/tcp/localhost/9' 2>&1 | while read a; do echo ${a##*: }; done",
        "Connection refused\nConnection refused\n",
    ),
    "/proc tells of the machine what ps needs, and no more": (
        "for f in meminfo stat; do read a b < /proc/$f; echo $a; done; cat /proc/cmdline /proc/locks; echo /proc/sys/*",
        "MemTotal:\ncpu\n/proc/sys/*\n",
    ),
    "owners are taken and not kept": ("touch f && chown 5:6 f && stat -c %u:%g f", "0:0\n"),
    "tar unpacks foreign owners": ("tar -xf /foreign.tar && stat -c %u:%g foreign/file", "0:0\n"),
    "dpkg installs": (
        "dpkg -i /greeting.deb >/dev/null && cat /opt/greeting && head -1 /var/lib/dpkg/status",
        "hello\nPackage: greeting\n",
    ),
    "a folder of the box's own replaces what the image has there": (
        "cat /dev/null; ls /proc/self/root/dev/null",
        "/proc/self/root/dev/null\n",
    ),
    "links lead nowhere else": (
        "ln -s ../../../../../../../../usr/share x; ls x/ 2>&1; cd /; cd ..; pwd",
        "ls: cannot access 'x/': No such file or directory\n/\n",
    ),
    "the working folder cannot be moved": (
        "mv /box /elsewhere 2>/dev/null; rmdir /box 2>/dev/null; pwd; ls -d /box",
        "/box\n/box\n",
    ),
}


LEADING_OUT = ("/proc/self/fd/210", "/proc/self/cwd", "/proc/1/cwd", "/proc/1/root", "/app")
"""Working folders of images. A command puts a link to the first in the place of the last."""


def is_ours(folder: str) -> bool:
    """Whether a folder of modules belongs to no interpreter."""
    return bool(folder) and not folder.startswith(sys.base_prefix)


async def checks(folder: Path) -> dict[str, Any]:
    """Run every command in a box of its own, and the file operations of the host."""
    layers = build(folder)
    boxes = BubblewrapBoxes(
        SandboxConfig(servers=1),
        image_of=lambda name: UnpackedImage(layers[name == "bare" :], ImageConfig(folder=name * name.startswith("/"))),
    )
    spec = BoxSpec(timeout_s=20.0, image="small", user=0)
    said: dict[str, Any] = {}
    try:
        for what, (command, _) in SHELL.items():
            box = await boxes.take(spec)
            result = await box.exec(["sh", "-c", command])
            said[what] = result.stdout + result.stderr
            await box.close()
        for place in LEADING_OUT:
            box = await boxes.take(replace(spec, image=place))
            await box.exec("rmdir /app; ln -s /proc/self/fd/210 /app", cwd="/")
            said[place] = (await box.exec("echo *; cd -P ..; echo *")).stdout.split()
            await box.close()
        box = await boxes.take(spec)
        said["python"] = (await box.python("said by the code")).stdout
        await box.write("/etc/written", b"by the host")
        said["written"] = (await box.exec(["cat", "/etc/written"])).stdout
        said["read"] = (await box.read("/etc/motd")).decode()
        await box.exec(["rm", "-r", "/etc"])
        kept = await box.snapshot()
        await box.exec(["mkdir", "/etc"])
        fork = await box.fork(kept)
        said["fork"] = [sorted(await one.entries("/")) for one in (box, fork)]
        said["foreign"] = (
            await (await boxes.take(BoxSpec(timeout_s=20.0, image="small"))).exec(
                ["sh", "-c", "id -u; id -un; id -gn; touch f; chown 5:6 f"]
            )
        ).stdout
        said["converse"] = (await box.converse("asks", "answers")).stdout
        bare = await boxes.take(BoxSpec(timeout_s=20.0, image="bare"))
        with pytest.raises(BadInput) as refused:
            await bare.converse("print(1)", "print(2)")
        said["refused"] = str(refused.value)
        await host_checks(boxes, said)
    finally:
        await boxes.close()
    return said


async def host_checks(boxes: BubblewrapBoxes, said: dict[str, Any]) -> None:
    host = await boxes.take(BoxSpec(timeout_s=20.0, image="host", user=0))
    said["host"] = (
        await host.exec(["sh", "-c", "touch /new /etc/new && ls -d /new /etc/new; touch /usr/new; id -u"])
    ).stdout
    serves = "import socket; print(socket.create_server(('localhost', 80)).getsockname())"
    said["host python"] = (await host.python(f"import json, os; print(os.getuid(), os.getcwd()); {serves}")).stdout


@pytest.mark.parametrize("who", USERS)
def test_a_root_is_the_image_s_and_can_be_written(who: str, tmp_path: Path) -> None:
    if who == "here":
        said = asyncio.run(checks(tmp_path / "image"))
    else:
        folder = tmp_path / "theirs"
        folder.mkdir()
        os.chown(folder, ORDINARY, ORDINARY)
        for parent in folder.parents[:-2]:
            parent.chmod(0o755)
        places = {"PATH": os.environ["PATH"], "PYTHONPATH": ":".join(filter(is_ours, sys.path))}
        line = ["/usr/bin/python3", __file__, str(folder / "image")]  # this process's may lie in a home
        done = subprocess.run(
            line, user=ORDINARY, group=ORDINARY, extra_groups=[], capture_output=True, cwd=folder, env=places
        )
        assert done.returncode == 0, done.stderr.decode()
        said = json.loads(done.stdout)
    listed = "bin\nbox\ndev\netc\nforeign.tar\ngreeting.deb\nlib\nlib64\nproc\ntmp\nusr\nvar\n"
    for what, (_, expected) in SHELL.items():
        assert said[what] == (listed if expected == "LISTED" else expected), what
    for place in LEADING_OUT:
        assert "greeting.deb" in said[place] and not {"own", "layers", "mnt"} & set(said[place]), place
    assert said["python"] == "python of the image\nsaid by the code"
    assert said["converse"] == "python of the image\nasks"
    assert said["refused"] == (
        "converse: expected a box whose image has a Python, got 'bare': python3: No such file or directory; do: install "
        "Python 3.9 or newer in it, or judge in a box of the image 'python' (`beside`)"
    )
    assert (said["written"], said["read"]) == ("by the host", "upper\n")
    assert "etc" in said["fork"][0] and "etc" not in said["fork"][1]
    assert said["foreign"] == "1000\nagent\nagent\n"
    assert said["host"] == "/etc/new\n/new\n0\n"
    assert said["host python"] == "0 /box\n('127.0.0.1', 80)\n"


def test_what_no_box_can_have_is_refused_by_name(bench: Any, tmp_path: Path) -> None:
    async def work(boxes: BubblewrapBoxes) -> None:
        for user in (-1, 65536, "root", True, 1.0):
            with pytest.raises(BadInput, match="box.user: expected a number from 0 to 65535"):
                await boxes.take(BoxSpec(user=user))
        with pytest.raises(BadInput, match="box.image"):
            await boxes.take(BoxSpec(image="absent"))

    bench.run(work)
    gone = BubblewrapBoxes(SandboxConfig(), image_of=lambda name: UnpackedImage((tmp_path / "gone",)))
    with pytest.raises(BadInput, match="box.image: expected unpacked layers, got no folder"):
        asyncio.run(gone.take(BoxSpec(image="small")))


def test_the_host_s_python_packages_are_not_in_the_default_image(bench: Any) -> None:
    code = "import glob; print(sum((glob.glob(f'/usr/{p}lib/python3*/*-packages/*') for p in ('', 'local/')), []))"
    outside = subprocess.run(["/usr/bin/python3", "-c", code], capture_output=True, text=True, check=True).stdout
    assert outside != "[]\n"
    assert bench.python(code).stdout == "[]\n"
    assert bench.python("open('/usr/lib/python3/dist-packages/new', 'w')").stderr.count("Read-only file system") == 1


if __name__ == "__main__":
    print(json.dumps(asyncio.run(checks(Path(sys.argv[1])))))
