"""docs/path/one-token.md: every step leads to the line where it happens."""

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WRITER = runpy.run_path(str(ROOT / "docs/write_one_token.py"))
PAGE = (ROOT / "docs/path/one-token.md").read_text()


def test_every_link_is_at_its_line() -> None:
    assert WRITER["numbered"](PAGE) == PAGE, "run: python docs/write_one_token.py"


def test_it_walks_through_few_files() -> None:
    links = list(WRITER["LINK"].finditer(PAGE))
    assert len(links) == PAGE.count(".py:") == PAGE.count("](../../src/") >= 25
    assert len({link["file"] for link in links}) <= 25


def test_a_line_that_moved_is_numbered_again() -> None:
    assert "[loop.py:1](x)" not in WRITER["numbered"]("`run_loop` [loop.py:1](x)")
    link = WRITER["numbered"]("`run_loop` [loop.py:1](x)")
    assert " ".join(link.split()) in " ".join(PAGE.split())


@pytest.mark.parametrize("symbol", ["run_loops", "StepWindow.acquire"])
def test_what_is_not_defined_there_is_refused(symbol: str) -> None:
    with pytest.raises(LookupError, match=f"src/sparring/loop.py: expected a definition of {symbol}, got none"):
        WRITER["numbered"](f"`{symbol}` [loop.py:1](x)")
