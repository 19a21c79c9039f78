"""Presets: how to start a published agent program so that all of its requests go to the gateway.

A preset is a TOML file: one of this package's folder `presets`, or a file that `[rollout] harness` names. Texts may
contain `{prompt}`, `{system}`, `{url}`, `{key}`, `{model}`, `{context}`, `{reply}`, `{recent}` and `{tools}`, which are
filled in for each rollout; a script is written unchanged.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from sparring.errors import refusal

FOLDER = Path(__file__).with_name("presets")
KEY = "rollout.harness"


class WithTools(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Additions for a world with tools, which an MCP server at `{tools}` offers under the same key."""

    arguments: tuple[str, ...] = ()
    """Additional arguments of the command."""

    files: dict[str, str] = {}
    """Files in the program's home, by path; they replace those of the preset."""


class AgentProgram(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Agent program, and how to start it."""

    command: tuple[str, ...]
    """Program and arguments. The program is searched in `node_modules/.bin` and `venv/bin` of the folder
    `rollout.programs`, then on PATH."""

    models: dict[str, str] = {}
    """Model for each model name of the program: `policy`, or `auxiliary` for replies that are not trained. `*` in a
    name stands for any characters."""

    leave_out: tuple[str, ...] = ()
    """Types of the vendor's server-side tools that are removed from requests instead of refusing them."""

    stdin: str = ""
    """Text of its standard input."""

    script: str = ""
    """File next to the preset that becomes `agent.py` in the program's home."""

    environment: dict[str, str] = {}
    """Environment variables, in addition to PATH, HOME, TMPDIR, LANG and TZ. Variables of the run itself are not passed
    on."""

    files: dict[str, str] = {}
    """Files in its home, by path."""

    with_tools: WithTools | None = None
    """Additions for a world with tools; a preset without this table cannot be used there."""

    calls_from_code: bool = False
    """Let the program call the world's tools without a sampled call, for a model that writes code which calls them.
    Each such call counts as a tool call of the rollout."""

    install: str = ""
    """Package of the program: `npm:name` or `pip:name`."""

    node: int = 0
    """Minimum major version of Node; 0: none needed."""

    timeout_s: float = 1800.0
    """Seconds after which the program is killed, and the rollout truncated."""

    grace_s: float = 60.0
    """Seconds that the program may go on after its rollout hits a limit, with every request refused."""

    memory_bytes: int = 4 << 30
    """Maximum memory of all its processes together."""

    disk_bytes: int = 512 << 20
    """Maximum bytes of files in its home and its work folder together."""

    processes: int = 512
    """Maximum number of processes and threads."""

    output_bytes: int = 16384
    """Maximum bytes that are kept of standard output and standard error each."""

    def __post_init__(self) -> None:
        if not self.command or not self.command[0]:
            raise ValueError("command must name a program")
        if (
            min(self.timeout_s, self.grace_s) <= 0
            or min(self.memory_bytes, self.disk_bytes, self.processes, self.output_bytes) < 1
        ):
            raise ValueError("timeout_s, grace_s, memory_bytes, disk_bytes, processes and output_bytes must be above 0")


def preset_names() -> tuple[str, ...]:
    """Return the names of this package's presets."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.toml")))


def load_preset(name: str) -> tuple[AgentProgram, str]:
    """Return a preset and the text of its script, or "".

    Args:
        name: name of one of this package's presets, or a path that ends in `.toml`.

    Raises:
        BadInput: the preset does not exist, or does not parse.
    """
    path = Path(name) if name.endswith(".toml") else FOLDER / f"{name}.toml"
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8-sig"))
        preset = msgspec.convert(data, AgentProgram)
        script = (path.parent / preset.script).read_text(encoding="utf-8") if preset.script else ""
    except OSError as error:
        raise refusal(KEY, f"a preset {path}", str(error), "check the path") from None
    except (ValueError, msgspec.ValidationError) as error:
        raise refusal(str(path), "a preset (docs/agents.md)", str(error), "correct it") from None
    return preset, script


def fill(text: str, values: Mapping[str, Any]) -> str:
    """Return a text with `{name}` replaced by each value; other braces stay, also those in values."""
    names = "|".join(map(re.escape, values))
    return re.sub(f"{{({names})}}", lambda match: str(values[match[1]]), text)
