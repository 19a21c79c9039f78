"""Files of images that tests make of this machine's own programs."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from sparring.sandbox.config import BOX_USER

SHELL = "sh bash ls cat printf truncate cp grep setsid echo mkfifo id env head tail wc sleep mkdir rm mv ln touch chmod kill true false seq stty tr".split()
LEFT_OUT = shutil.ignore_patterns(
    *(
        "test",
        "tests",
        "idlelib",
        "tkinter",
        "lib2to3",
        "ensurepip",
        "pydoc_data",
        "turtledemo",
        "config-*",
        "distutils",
    ),
    *(
        "asyncio",
        "unittest",
        "xml",
        "xmlrpc",
        "sqlite3",
        "curses",
        "dbm",
        "wsgiref",
        "*dist-packages",
        "*site-packages",
    ),
    *("_codecs_*.so", "_decimal*.so", "_sqlite3*.so", "_curses*.so", "_tkinter*.so", "_dbm*.so", "_gdbm*.so"),
)
"""Parts of Python's library that no test needs."""


@contextmanager
def open_folder() -> Iterator[Path]:
    """Make a folder that every user can enter, as images have to be in one and pytest's are not, and remove it."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        Path(name).chmod(0o755)
        yield Path(name)


def copy_programs(programs: Iterable[str], root: Path) -> None:
    """Copy programs of this machine, and the libraries that they need, below a root."""
    paths = [Path(shutil.which(name) or "/missing") for name in programs]
    (root / "usr/bin").mkdir(parents=True, exist_ok=True)
    for path in paths:
        shutil.copy(path, root / "usr/bin" / path.name)
    copy_libraries(paths, root)


def copy_libraries(files: Iterable[Path], root: Path) -> None:
    """Copy the libraries that programs and libraries need."""
    said = subprocess.run(["ldd", *files], capture_output=True, text=True).stdout
    for library in dict.fromkeys(re.findall(r"(?:=>|^)\s*(/\S+) \(0x", said, re.MULTILINE)):
        target = root / library.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists():
            shutil.copy(library, target)


def copy_python(root: Path) -> None:
    """Copy the system's Python with its library."""
    python = Path(os.path.realpath("/usr/bin/python3"))
    library = Path("/usr/lib") / python.name
    copy_programs([str(python)], root)
    (root / "usr/bin/python3").symlink_to(python.name)
    shutil.copytree(library, root / "usr/lib" / python.name, ignore=LEFT_OUT)
    copy_libraries(sorted((root / "usr/lib" / python.name / "lib-dynload").glob("*.so")), root)


def empty_image(folder: Path) -> Path:
    """Return the only layer of an image, in which nothing is but a few folders."""
    layer = folder / "layers/only"
    for name in ("usr/bin", "usr/lib", "etc", "tmp"):
        (layer / name).mkdir(parents=True)
    for name in ("bin", "lib"):
        (layer / name).symlink_to(f"usr/{name}")
    (layer / "etc/passwd").write_text("root:x:0:0::/:/bin/sh\nagent:x:1000:1000::/agent:/bin/sh\n")
    return layer


def readable(folder: Path) -> None:
    """Give an image to the user whom boxes run as, who can enter every folder on its path."""
    if os.geteuid() == 0:
        for path in (folder, *folder.rglob("*")):
            os.chown(path, BOX_USER, BOX_USER, follow_symlinks=False)
    for path in (folder, *folder.parents):
        if not path.stat().st_mode & 0o005 and path != Path("/"):
            path.chmod(path.stat().st_mode | 0o055)


def python_image(folder: Path) -> tuple[Path, ...]:
    """Make an image with a shell and a Python. Return its layers."""
    layer = empty_image(folder)
    copy_programs(SHELL, layer)
    copy_python(layer)
    readable(folder)
    return (layer,)


def save_archive(layer: Path, archive: Path, environment: Sequence[str] = (), folder: str = "") -> None:
    """Write the tar that `docker save` would write of an image with one layer.

    Args:
        environment: the image's variables, NAME=value.
        folder: its working directory.
    """
    content = archive.with_suffix(".layer")
    with tarfile.open(content, "w") as tar:
        tar.add(layer, ".")
    digest = hashlib.sha256(content.read_bytes()).hexdigest()
    config = {
        "architecture": {"x86_64": "amd64", "aarch64": "arm64"}[platform.machine()],
        "os": "linux",
        "config": {"Env": list(environment), "WorkingDir": folder},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
    }
    (settings := archive.with_suffix(".config")).write_text(json.dumps(config))
    manifest = [{"Config": settings.name, "RepoTags": None, "Layers": [content.name]}]
    (named := archive.with_suffix(".manifest")).write_text(json.dumps(manifest))
    with tarfile.open(archive, "w") as tar:
        for path, name in ((named, "manifest.json"), (settings, settings.name), (content, content.name)):
            tar.add(path, name)
