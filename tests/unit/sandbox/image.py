"""A small image by hand: two unpacked layers of this machine's own programs."""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
from pathlib import Path

from image_files import copy_programs, readable

PROGRAMS = (
    "sh bash ls cat id tar chown stat rm rmdir mv mkdir touch ln diff dpkg dpkg-deb dpkg-split head env sleep".split()
)
CONTROL = (
    "Package: greeting\nVersion: 1\nArchitecture: all\nMaintainer: nobody <n@example.org>\nDescription: says hello\n"
)


def build(folder: Path) -> tuple[Path, ...]:
    """Make the layers of an image below a folder, for boxes of this process's user. Returns them, lowest first."""
    lower, upper = folder / "layers/lower", folder / "layers/upper"
    for name in ("usr/bin", "etc", "var/lib/dpkg/updates", "var/lib/dpkg/info", "tmp", "lib64"):
        (lower / name).mkdir(parents=True, exist_ok=True)
    (lower / "bin").symlink_to("usr/bin")
    copy_programs(PROGRAMS, lower)
    for name in ("ldconfig", "start-stop-daemon"):  # dpkg wants to find them
        _script(lower / "usr/bin" / name, "exit 0")
    _script(lower / "usr/bin/python3", "echo python of the image\ncat")
    (lower / "etc/motd").write_text("lower\n")
    (lower / "etc/hidden").write_text("hidden\n")
    (lower / "etc/passwd").write_text("root:x:0:0::/:/bin/sh\n")
    (lower / "var/lib/dpkg/status").write_text("")
    (lower / "var/lib/dpkg/available").write_text("")
    (lower / "dev").symlink_to("etc")
    (lower / "proc").write_text("a file in place of a folder")
    (upper / "etc").mkdir(parents=True)
    (upper / "etc/motd").write_text("upper\n")
    _write_out(upper / "etc/hidden")
    _archive(upper / "foreign.tar")
    _package(folder, upper / "greeting.deb")
    readable(folder)
    return lower, upper


def _script(path: Path, body: str) -> None:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


def _write_out(path: Path) -> None:
    """Hide what lower layers have at a path, as overlayfs does."""
    try:
        os.mknod(path, 0o20000, 0)
    except PermissionError:  # one user's mount takes a mark in place of a device (user.overlay.whiteout)
        path.write_bytes(b"")
        os.setxattr(path, "user.overlay.whiteout", b"y")
        os.setxattr(path.parent, "user.overlay.opaque", b"x")


def _archive(path: Path) -> None:
    with tarfile.open(path, "w") as archive:
        entry = tarfile.TarInfo("foreign/file")
        entry.uid, entry.gid, entry.size = 33, 44, 2
        archive.addfile(entry, io.BytesIO(b"x\n"))


def _package(folder: Path, path: Path) -> None:
    content = folder / "greeting"
    (content / "DEBIAN").mkdir(parents=True)
    (content / "DEBIAN/control").write_text(CONTROL)
    (content / "opt").mkdir()
    (content / "opt/greeting").write_text("hello\n")
    subprocess.run(["dpkg-deb", "--build", content, path], check=True, capture_output=True)
