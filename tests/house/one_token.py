"""docs/path/one-token.md: every step leads to the line where it happens, through few files."""

import runpy
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WRITER = runpy.run_path(str(ROOT / "docs/write_one_token.py"))
PAGE = (ROOT / "docs/path/one-token.md").read_text(encoding="utf-8")
MOST_FILES = 25


def findings() -> Iterator[str]:
    """Yield what is wrong with the page."""
    if WRITER["numbered"](PAGE) != PAGE:
        yield "docs/path/one-token.md: a line has moved; run: python docs/write_one_token.py"
    links = list(WRITER["LINK"].finditer(PAGE))
    if not len(links) == PAGE.count(".py:") == PAGE.count("](../../src/") >= 25:
        yield "docs/path/one-token.md: a link into the source is not written as `symbol` [file.py:LINE](path)"
    if (count := len({link["file"] for link in links})) > MOST_FILES:
        yield f"docs/path/one-token.md: {count} files, more than {MOST_FILES}"
