"""Every link between the pages leads to a file that is there, and to a heading of it."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")


def pages(root: Path) -> list[Path]:
    return sorted([*root.glob("*.md"), *root.glob("docs/**/*.md"), *root.glob("design/*.md"), *root.glob("log/*.md")])


def headings(text: str) -> set[str]:
    """As anchors: lower case, hyphens for spaces, other punctuation left out."""
    titles = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def broken_links(root: Path) -> list[str]:
    found = []
    for page in pages(root):
        for name, anchor in LINK.findall(page.read_text()):
            target = page.parent / name if name else page
            if not target.exists() or (anchor and anchor not in headings(target.read_text())):
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
