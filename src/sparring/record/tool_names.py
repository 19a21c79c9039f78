"""Names of tools as clients write them: a server's name before the tool's, and `_` for what their vendor takes in none.

`mcp__world__add`, `mcp_world_add`, `world_add` and `world-add` are the tool `add` of the server `world`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_OTHER = re.compile(r"[^0-9A-Za-z]")


def stands_for(name: str, tool: str) -> bool:
    """Return whether a name stands for a tool: it ends with the tool's name, behind nothing or a character that is no
    letter and no digit. Letters and digits have to agree.

    Args:
        name: as a client shows the tool.
        tool: name of the tool.
    """
    if name == tool:
        return True
    shown, own = _OTHER.sub("_", name), _OTHER.sub("_", tool)
    return bool(own) and (shown == own or shown.endswith(f"_{own}"))


def tool_meant(name: str | None, tools: Iterable[str]) -> str | None:
    """Return the tool that a name stands for: of several the one with this very name, else the longest; None where it
    stands for none.

    Args:
        name: as a client shows the tool; None is none's.
        tools: names of the tools.
    """
    meant = [] if name is None else [tool for tool in tools if stands_for(name, tool)]
    return max(meant, key=lambda tool: (tool == name, len(tool)), default=None)
