"""Mounts of a box in addition to `/usr`: a program's package and interpreter, and nothing else that belongs to a user.

A file that is in no package, environment or prefix is mounted alone. Folders are mounted by their parts, so that their
neighbours (a project's `.env`, a configuration with a key) stay outside.
"""

from __future__ import annotations

import grp
import os
import pwd
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from sparring.errors import refusal
from sparring.sandbox.config import BOX_USER

SYSTEM = tuple(map(Path, ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64")))
"""Folders of the host that every box sees."""

OWN = tuple(map(Path, ("/tmp", "/box", "/agent", "/mnt", "/dev", "/proc")))
"""Folders that every box replaces with its own."""

HOMES = Path("/home")

ENVIRONMENT = ("pyvenv.cfg", "bin", "lib64")
"""Parts of a virtual environment, besides its `lib/pythonX`."""

PREFIX = ("bin", "lib", "lib64", "share", "ssl")
"""Parts of the folder that a Python is installed in."""

KEPT = (".local", ".config", ".cache")
"""Folders of a home that many programs share and keep keys in. They are never mounted, nor are the folders in
`.local`."""

SHARED = ("bin", "etc", "include", "lib", "libexec", "local", "man", "sbin", "share", "var")
"""Folders of /opt that belong to no package."""


def box_identity(user: int = BOX_USER) -> dict[str, Any]:
    """Return arguments of Popen that run bubblewrap as `user`; empty if Sparring is not root, or if its namespace lacks
    the id. The kernel applies no limit on processes to root."""
    rows = [[int(word) for word in line.split()] for line in Path("/proc/self/uid_map").read_text().splitlines()]
    is_mapped = any(first <= user < first + count for first, _, count in rows)
    return {"user": user, "group": user, "extra_groups": []} if os.geteuid() == 0 and is_mapped else {}


def check_box_user(user: int) -> None:
    """Refuse a user id for boxes that an account has, because other processes with this id can enter boxes.

    Raises:
        BadInput: passwd or group has an entry for the id, or subuid or subgid reserves it for an account's containers.
    """
    if box_identity(user) and (names := [*_named(pwd.getpwuid, user), *_named(grp.getgrgid, user)]):
        raise user_refusal(user, f"that of {names[0][0]}")
    for file in filter(os.path.isfile, ("/etc/subuid", "/etc/subgid") if box_identity(user) else ()):
        for name, first, count in re.findall(r"(?m)^([^:#\s]+):(\d+):(\d+)", Path(file).read_text("utf-8", "replace")):
            if int(first) <= user < int(first) + int(count):
                raise user_refusal(user, f"which {file} lends to {name}")


def user_refusal(user: int, whose: str) -> Exception:
    """Return the refusal of an id that boxes cannot have to themselves."""
    remedy = "do: set sandbox.user to another, and pull images with --user"
    return refusal("sandbox.user", "an id that nobody has, for boxes alone", f"{user}, {whose}", remedy)


def mounts_of_program(program: Path, where: str) -> dict[str, str]:
    """Return the files and folders of the host that a program needs. For the program's file and for each link that
    leads to it, this is the package or environment, or else the file or link alone.

    Args:
        program: absolute path of the program's file.
        where: setting that named it, for refusals.

    Returns:
        paths on the host by path in the box. A link is recreated as a link (`arguments_of`).

    Raises:
        BadInput: the program cannot be mounted without a home, or without a folder of a home that many programs share;
            or the boxes' user cannot read it.
    """
    paths, sources = links(program), list[Path]()
    if any("node_modules" in path.parts for path in paths) and "node_modules" not in paths[-1].parts:
        remedy = "do: npm install --install-links --prefix .harnesses FOLDER, which copies it"
        raise refusal(where, "a package of npm that is installed", f"{program}, a link to {paths[-1]}", remedy)
    for path in paths:
        if not in_every_box(path):
            sources += _package(path, where)
    mounts = {str(source): str(source) for source in sources}
    check_mounts(mounts, where)
    return mounts


def check_mounts(mounts: Mapping[str, str], where: str, user: int = BOX_USER) -> None:
    """Refuse mounts that a box must not have, cannot show, or cannot read.

    Args:
        where: setting that asked for them, for refusals.
        user: `sandbox.user`, whose files it may show.

    Raises:
        BadInput: a mount is a home, or a folder of a home that many programs share; its path in the box is in a folder
            that boxes replace with their own; or the boxes' user cannot read it or enter a folder on its path.
    """
    for target, source in mounts.items():
        if any(Path(target).is_relative_to(own) for own in OWN):
            remedy = "do: move it to another folder; boxes have folders of their own at " + ", ".join(map(str, OWN))
            raise refusal(where, "a program that boxes can see", f"{source}, over which their own folder lies", remedy)
        if os.path.isdir(source) and is_private(Path(source)):
            raise _private_refusal(Path(source), where)
        if (closed := unreadable_part(Path(source), user)) is not None:
            whom = f"user {user}, whom boxes run as" if box_identity(user) else "the user whom boxes run as"
            actual = f"{source}, but {whom}, cannot read {closed} (mode {closed.stat().st_mode & 0o7777:04o})"
            remedy = f"do: chmod o+{'rx' if closed == Path(source) else 'x'} {closed}, or install it in another folder"
            raise refusal(where, "a program that boxes can read", actual, remedy)


def outermost(mounts: Mapping[str, str]) -> dict[str, str]:
    """Return the mounts that lie in no other one, in the order of their paths."""
    folders = {target for target, source in mounts.items() if target == source and os.path.isdir(source)}
    ordered = sorted(mounts.items())
    return {target: source for target, source in ordered if not folders & set(map(str, Path(target).parents))}


def arguments_of(mounts: Mapping[str, str]) -> list[str]:
    """Return bubblewrap's arguments for read-only mounts."""
    arguments = []
    for target, source in outermost(mounts).items():
        if target == source and os.path.islink(source):
            arguments += ["--symlink", str(_next(Path(source))), target]
        else:
            arguments += ["--ro-bind", source, target]
    return arguments


def hidden_homes() -> list[str]:
    """Return the homes under /usr, which boxes would see otherwise."""
    return [str(home) for home in _homes() if home.is_relative_to("/usr") and len(home.parts) > 3 and home.is_dir()]


def links(path: Path) -> list[Path]:
    """Return a path and everything it leads to, link by link, with the final file last."""
    paths = [path]
    while paths[-1].is_symlink() and len(paths) < 40:  # the kernel's maximum
        paths.append(_next(paths[-1]))
    return list(dict.fromkeys([*paths, Path(os.path.realpath(path))]))


def _next(link: Path) -> Path:
    target = link.readlink()
    return target if target.is_absolute() else Path(os.path.normpath(os.path.realpath(link.parent) / target))


def in_every_box(path: Path) -> bool:
    """Return True if boxes see a path without a mount of its own."""
    return any(path.is_relative_to(folder) for folder in SYSTEM) and not any(map(path.is_relative_to, hidden_homes()))


def is_private(folder: Path) -> bool:
    """Return True for a home, a folder that contains one, and a folder in a home that many programs share."""
    real = Path(os.path.realpath(folder))
    return _is_private(folder) or real != folder and _is_private(real)


def _is_private(folder: Path) -> bool:
    if HOMES.is_relative_to(folder):
        return True
    for home in _homes(folder):
        if home.is_relative_to(folder):
            return True
        if folder.is_relative_to(home):
            inner = folder.relative_to(home).parts
            depth = 2 if inner[0] == ".local" else 1
            is_environment = inner[0] not in KEPT and (folder / "pyvenv.cfg").is_file()
            if inner[0].startswith(".") and len(inner) <= depth and not is_environment:
                return True
    return False


def _homes(folder: Path = Path("/")) -> Iterator[Path]:
    """Yield the homes that matter for a folder: this user's, root's, and the home that the folder's path begins
    with."""
    user = [entry.pw_dir for entry in _named(pwd.getpwuid, os.getuid())]
    named = [os.environ.get("HOME", "/root"), *user, "/root"]
    if folder.is_relative_to(HOMES):
        named.append(str(Path(*folder.parts[:3])))
    named += [os.path.realpath(name) for name in named]
    yield from (Path(name) for name in dict.fromkeys(named) if name.startswith("/") and name != "/")


def _named(entry_of: Callable[[int], Any], number: int) -> list[Any]:
    """Return the entry of an id in passwd or group, as a list; empty if the id has no entry."""
    try:
        return [entry_of(number)]
    except KeyError:
        return []


def _package(path: Path, where: str) -> list[Path]:
    """Return the paths to mount for one file: parts of its package, or else the file alone.

    Raises:
        BadInput: the file is installed in a home, or in a folder of a home that many programs share.
    """
    parts = path.parts
    if "node_modules" in parts[:-1]:
        return [_node_package(parts, parts.index("node_modules"))]
    if path.parent.name == "bin" and (names := _python_parts(prefix := path.parent.parent)):
        if not is_private(prefix):
            return [prefix / name for name in names if (prefix / name).exists()]
        if path.name.startswith("python"):
            raise _private_refusal(prefix, where)
    if parts[:3] == ("/", "nix", "store"):  # a closure of packages, readable by everyone by design
        return [Path("/nix/store")]
    if parts[1] == "opt" and len(parts) > 3 and parts[2] not in SHARED and not is_private(Path(*parts[:3])):
        return [Path(*parts[:3])]  # a package of its own: Filesystem Hierarchy Standard 3.0, section 3.13
    return [path] if os.access(path, os.X_OK) else []  # only executables: a link may lead to any file, also a key


def _node_package(parts: tuple[str, ...], at: int) -> Path:
    """Return the folder of an npm package: a global package contains its dependencies, a local one has them next to it,
    and pnpm keeps all in one folder, with links to each other."""
    if parts[at - 2] == ".pnpm":
        return Path(*parts[: at - 1])
    if parts[at - 1] == "lib" and len(parts) > at + 2 and not parts[at + 1].startswith("."):
        return Path(*parts[: at + (3 if parts[at + 1].startswith("@") else 2)])
    return Path(*parts[: at + 1])


def _python_parts(folder: Path) -> tuple[str, ...]:
    """Return the parts of a Python environment or prefix to mount; () if the folder is neither."""
    libraries = [library for library in folder.glob("lib/python3*") if library.is_dir()]
    if (folder / "pyvenv.cfg").is_file():
        return (*ENVIRONMENT, *(str(library.relative_to(folder)) for library in libraries))
    return PREFIX if any((library / "os.py").is_file() for library in libraries) else ()


def unreadable_part(source: Path, user: int = BOX_USER) -> Path | None:
    """Return the first part of a path that the boxes' user cannot read; None if it can read all."""
    real = Path(os.path.realpath(source))
    if not box_identity(user):
        ways = [(parent, os.X_OK) for parent in reversed(real.parents)]
        ways.append((real, os.R_OK | (os.X_OK if real.is_dir() else 0)))
        return next((path for path, mode in ways if not os.access(path, mode)), None)
    for path in (*reversed(real.parents), real):
        kind = path.stat()
        bits = kind.st_mode >> (6 if kind.st_uid == user else 3 if kind.st_gid == user else 0)
        if not bits & 1 and path.is_dir() or path == real and not bits & 4:
            return path
    return None


def _private_refusal(folder: Path, where: str) -> Exception:
    actual = f"one whose folder is {folder}, which holds what is not its own"
    remedy = (
        "do: install it in a folder of its own (rollout.programs for agent programs: a virtual environment or npm's)"
    )
    return refusal(where, "a program that can be mounted without a user's files", actual, remedy)
