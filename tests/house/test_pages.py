"""The lints of pages find broken links, wide lines and long pages."""

from pathlib import Path

import pytest
from pages import WRAP, broken_links, long_pages


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/a.md").write_text(
        "# One `step`, two\n[b](b.md) [up](../README.md) [here](#one-step-two) [web](https://b.md)"
    )
    (tmp_path / "README.md").write_text("[a](docs/a.md#one-step-two) [b](docs/a.md#two)")
    assert broken_links(tmp_path) == ["README.md: docs/a.md#two", "docs/a.md: b.md#"]


def test_a_long_written_page_is_found(tmp_path: Path) -> None:
    (tmp_path / "docs/algorithms").mkdir(parents=True)
    (tmp_path / "docs/algorithms/gate.md").write_text("a\n" * 300)
    assert long_pages(tmp_path) == []
    (tmp_path / "docs/algorithms/credit.md").write_text("a\n" * 301)
    (found,) = long_pages(tmp_path)
    assert found.startswith("docs/algorithms/credit.md: 301 lines")


WORDS = "sand and stone " * 9
FIXED = [
    f"| {WORDS} | {WORDS} |",
    f"```text\n{WORDS}\n```",
    f"Code:\n\n    {WORDS}",
    f"# {WORDS}",
    f"[a](https://{WORDS.replace(' ', '/')})",
    f"- [a](https://{WORDS.replace(' ', '/')})",
]


def test_a_wide_line_is_found_and_filled_anew() -> None:
    text = f"A [link of words](b.md) and {WORDS}`some code` - 3.\n\n1. An item: {WORDS}\n   goes on\n- Next\n"
    assert WRAP["wide_lines"](text) == [1, 3]
    filled = WRAP["wrapped"](text)
    assert WRAP["wide_lines"](filled) == [] and WRAP["wrapped"](filled) == filled and filled.split() == text.split()
    assert "`some code` - 3.\n\n1. An item:" in filled and "\n   goes on" not in filled
    assert filled.endswith("goes on\n- Next\n") and "\n   " in filled


@pytest.mark.parametrize("text", FIXED)
def test_what_cannot_be_broken_stays(text: str) -> None:
    assert WRAP["wide_lines"](text) == [] and WRAP["wrapped"](text) == text
