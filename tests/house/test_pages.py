"""Every link between the pages leads to a file that is there, and to a heading of it; prose has at most 120 columns."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WRAP = runpy.run_path(str(ROOT / "docs" / "wrap.py"))
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")


def pages(root: Path) -> list[Path]:
    return sorted([*root.glob("*.md"), *root.glob("docs/**/*.md"), *root.glob("design/*.md"), *root.glob("log/*.md")])


def headings(text: str) -> set[str]:
    """As anchors: lower case, hyphens for spaces, other punctuation left out."""
    titles = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def anchors(target: Path) -> set[str]:
    """Return what a link into a file may name: headings of a page, lines of a source file."""
    text = target.read_text()
    if target.suffix == ".md":
        return headings(text)
    return {f"L{number}" for number, _ in enumerate(text.splitlines(), 1)}


def broken_links(root: Path) -> list[str]:
    found = []
    for page in pages(root):
        for name, anchor in LINK.findall(page.read_text()):
            target = page.parent / name if name else page
            if not target.exists() or (anchor and anchor not in anchors(target)):
                found.append(f"{page.relative_to(root)}: {name}#{anchor}")
    return found


def test_every_link_leads_somewhere() -> None:
    assert broken_links(ROOT) == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/a.md").write_text(
        "# One `step`, two\n[b](b.md) [up](../README.md) [here](#one-step-two) [web](https://b.md)"
    )
    (tmp_path / "README.md").write_text("[a](docs/a.md#one-step-two) [b](docs/a.md#two)")
    assert broken_links(tmp_path) == ["README.md: docs/a.md#two", "docs/a.md: b.md#"]


WORDS = "sand and stone " * 9
FIXED = [
    f"| {WORDS} | {WORDS} |",
    f"```text\n{WORDS}\n```",
    f"Code:\n\n    {WORDS}",
    f"# {WORDS}",
    f"[a](https://{WORDS.replace(' ', '/')})",
    f"- [a](https://{WORDS.replace(' ', '/')})",
]


def test_prose_is_wrapped() -> None:
    pages = WRAP["pages"](ROOT)
    assert len(pages) > 30
    wide = [f"{page.relative_to(ROOT)}:{n}" for page in pages for n in WRAP["wide_lines"](page.read_text())]
    assert not wide, f"run: python docs/wrap.py\n{wide}"


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
