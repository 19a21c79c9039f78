"""Presets: how a published agent program is started so that every byte it asks for comes to the gateway.

A preset is a TOML file: those of this package's folder `presets`, or any file that `[rollout] harness` names. Texts may
hold `{prompt}`, `{system}`, `{url}`, `{key}`, `{model}`, `{context}`, `{reply}`, `{recent}` and `{tools}`, which are
filled in for each rollout; a script is written as it is.
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
    """Additions where the world has tools, which are an MCP server at `{tools}` under the same key."""

    arguments: tuple[str, ...] = ()
    """Arguments that are added to the command."""

    files: dict[str, str] = {}
    """Files in the program's home, by path; they replace those of the preset."""


class AgentProgram(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An agent program, and how it is started."""

    command: tuple[str, ...]
    """The program and its arguments. Programs are looked for in the folder `rollout.programs` (npm's and a virtual
    environment's), then on PATH."""

    models: dict[str, str] = {}
    """Other names that the program has for models, each with the one that answers: `policy`, or `auxiliary`, whose
    replies are not trained. `*` stands for any letters."""

    leave_out: tuple[str, ...] = ()
    """Types of tools of the vendor's servers that are left out of requests in the place of refusing them."""

    stdin: str = ""
    """Text of its standard input."""

    script: str = ""
    """File beside the preset that becomes `agent.py` in the program's home."""

    environment: dict[str, str] = {}
    """Its environment, beside PATH, HOME, TMPDIR, LANG and TZ; nothing of the run's own."""

    files: dict[str, str] = {}
    """Files in its home, by path."""

    with_tools: WithTools | None = None
    """Additions where the world has tools; a preset without cannot be used there."""

    calls_from_code: bool = False
    """True lets calls of the world's tools run that stand in no reply, for a model that writes code which calls them.
    Each counts as a tool call of the rollout."""

    install: str = ""
    """Package that holds the program: `npm:name` or `pip:name`."""

    node: int = 0
    """Least major version of Node that it runs on; 0: it needs none."""

    timeout_s: float = 1800.0
    """Seconds after which it is killed; the rollout is then truncated."""

    grace_s: float = 60.0
    """Seconds that it may go on after its rollout has hit a limit: every request is refused then."""

    memory_bytes: int = 4 << 30
    """Memory of all its processes together."""

    disk_bytes: int = 512 << 20
    """Bytes that it may write, in its home and its work folder together."""

    processes: int = 512
    """Processes and threads."""

    output_bytes: int = 16384
    """Output that is retained, of standard output and of standard error each."""

    def __post_init__(self) -> None:
        if not self.command or not self.command[0]:
            raise ValueError("command must name a program")
        if (
            min(self.timeout_s, self.grace_s) <= 0
            or min(self.memory_bytes, self.disk_bytes, self.processes, self.output_bytes) < 1
        ):
            raise ValueError("timeout_s, grace_s, memory_bytes, disk_bytes, processes and output_bytes must be above 0")


def preset_names() -> tuple[str, ...]:
    """Return the names of the presets of this package."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.toml")))


def load_preset(name: str) -> tuple[AgentProgram, str]:
    """Read a preset.

    Args:
        name: of this package's presets, or a path that ends in `.toml`.

    Returns:
        the preset, and the text of its script, empty where it has none.

    Raises:
        BadInput: there is none, or it does not parse.
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
    """Return a text with `{name}` replaced by each value; other braces stay, and so do those that a value brings."""
    names = "|".join(map(re.escape, values))
    return re.sub(f"{{({names})}}", lambda match: str(values[match[1]]), text)
