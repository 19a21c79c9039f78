"""Writes the line numbers of docs/path/one-token.md: each link stands behind the name of what is defined there. Run it
after moving one.

python docs/write_one_token.py
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = Path(__file__).with_name("path") / "one-token.md"
LINK = re.compile(r"`(?P<symbol>[\w.]+)`(?P<space>\s+)\[(?P<file>[\w/]+\.py):\d*\]\([^)]*\)")


def line_of(file: str, symbol: str) -> int:
    """Return the line of `src/sparring/<file>` in which a function, class or method is defined.

    Raises:
        LookupError: it is not defined there.
    """
    scope: list[ast.stmt] = ast.parse((ROOT / "src/sparring" / file).read_text(encoding="utf-8")).body
    line = 0
    for name in symbol.split("."):
        named = (node for node in scope if getattr(node, "name", None) == name)
        node = next((node for node in named if hasattr(node, "lineno")), None)
        if node is None:
            raise LookupError(f"src/sparring/{file}: expected a definition of {symbol}, got none; correct {PAGE.name}")
        line, scope = node.lineno, node.body
    return line


def numbered(text: str) -> str:
    """Return the page with the number of every link's line as it is now.

    Raises:
        LookupError: something that a link names is not defined in its file.
    """

    def link(match: re.Match[str]) -> str:
        symbol, file = match["symbol"], match["file"]
        line = line_of(file, symbol)
        return f"`{symbol}`{match['space']}[{file}:{line}](../../src/sparring/{file}#L{line})"

    return LINK.sub(link, text)


if __name__ == "__main__":
    PAGE.write_text(numbered(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
