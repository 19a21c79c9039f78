"""Every link between the pages leads to a file that is there, and to a heading of it; prose has at most 120 columns, and
a page that is written from the source at most 300 lines."""

import re
import runpy
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WRAP = runpy.run_path(str(ROOT / "docs" / "wrap.py"))
WRITTEN = ("configuration", "algorithms", "reference")
"""Folders of pages that programs write."""

LONGEST = 300
"""Lines of such a page."""

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


def long_pages(root: Path) -> list[str]:
    """Return the pages that programs write from the source, and that have more lines than one reads."""
    written = [page for folder in WRITTEN for page in sorted(root.glob(f"docs/{folder}/*.md"))]
    lengths = {page: page.read_text(encoding="utf-8").count("\n") for page in written}
    return [
        f"{page.relative_to(root)}: {lines} lines, more than {LONGEST}; let its writer begin another page"
        for page, lines in lengths.items()
        if lines > LONGEST
    ]


def findings() -> Iterator[str]:
    """Yield broken links, prose that is too wide and written pages that are too long, over all pages."""
    yield from broken_links(ROOT)
    yield from long_pages(ROOT)
    pages = WRAP["pages"](ROOT)
    assert len(pages) > 30, f"expected the pages in {ROOT}, got {len(pages)}"
    for page in pages:
        lines = WRAP["wide_lines"](page.read_text(encoding="utf-8"))
        yield from (f"{page.relative_to(ROOT)}:{line}: too wide; run: python docs/wrap.py" for line in lines)
