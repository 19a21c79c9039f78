"""The page on metrics has their declared tables."""

from collections.abc import Iterator
from pathlib import Path

from sparring.observe.metric_table import tables

PAGE = Path(__file__).resolve().parents[2] / "docs" / "path" / "observe.md"


def findings() -> Iterator[str]:
    """Yield the declared tables that the page lacks."""
    text = PAGE.read_text(encoding="utf-8")
    yield from (f"docs/path/observe.md: put this table there\n{table}" for table in tables() if table not in text)
