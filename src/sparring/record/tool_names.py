"""Names of tools in the spelling of clients: with a server's name before the tool's, and `_` for special characters.

`mcp__world__add`, `mcp_world_add`, `world_add` and `world-add` are the tool `add` of the server `world`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_OTHER = re.compile(r"[^0-9A-Za-z]")


def stands_for(name: str, tool: str) -> bool:
    """Return whether a client's name means a tool: the client's name ends with the tool's name, after nothing or a
    character that is neither a letter nor a digit. Only letters and digits are compared."""
    if name == tool:
        return True
    said, own = _OTHER.sub("_", name), _OTHER.sub("_", tool)
    return bool(own) and (said == own or said.endswith(f"_{own}"))


def tool_meant(name: str | None, tools: Iterable[str]) -> str | None:
    """Return the tool that a client's name means: an equal name first, then the longest match; None without a match.
    `name`: client's name of the tool; None matches no tool."""
    meant = [] if name is None else [tool for tool in tools if stands_for(name, tool)]
    return max(meant, key=lambda tool: (tool == name, len(tool)), default=None)
