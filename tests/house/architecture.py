"""design/architecture.md tells what is there: the files of its tree exist, and its table of layers is `LAYERS`."""

import re
from collections.abc import Iterator
from pathlib import Path

from structure import LAYERS, SOURCE

PAGE = SOURCE.parents[1] / "design" / "architecture.md"
TREE = re.compile(r"^    src/sparring/\n((?:(?:      .*)?\n)+)", re.MULTILINE)
ENTRY = re.compile(r"^      (\w+(?:\.py|/))(?= )", re.MULTILINE)
FOLDER = re.compile(r"\b([a-z_]+)/(?=[ ,.;:)])")
ROW = re.compile(r"^\| (\d) \| ([^|]*) \|", re.MULTILINE)


def tree(page: str) -> dict[str, str]:
    """Return the entries of the tree, each with what is said of it."""
    listing = TREE.search(page)
    text = listing[1] if listing else ""
    starts = [*ENTRY.finditer(text)]
    ends = [start.start() for start in starts[1:]] + [len(text)]
    return {start[1]: text[start.end() : end] for start, end in zip(starts, ends, strict=True)}


def absent(page: str, source: Path) -> Iterator[str]:
    """Yield what the tree names and the source lacks, and the packages of the source that the tree leaves out."""
    entries = tree(page)
    for entry, told in entries.items():
        if not (source / entry).exists():
            yield f"design/architecture.md: {entry} is not there"
        for folder in FOLDER.findall(told) if entry.endswith("/") else ():
            if not (source / entry / folder).is_dir():
                yield f"design/architecture.md: {entry}{folder}/ is not there"
    for path in sorted(source.iterdir()):
        if (path / "__init__.py").exists() and f"{path.name}/" not in entries:
            yield f"design/architecture.md: the tree leaves out {path.name}/"


def layers(page: str, expected: tuple[str, ...]) -> Iterator[str]:
    """Yield the rows of the table of layers that differ from the rule."""
    rows = {
        int(number): set(re.findall(r"\w+", re.sub(r"\([^)]*\)|`\(.*", "", names)))
        for number, names in ROW.findall(page)
    }
    for number, names in enumerate(expected):
        if rows.get(number) != set(names.split()):
            yield f"design/architecture.md: layer {number} is {' '.join(sorted(names.split()))}"


def findings() -> Iterator[str]:
    """Yield where the page and the source differ."""
    page = PAGE.read_text(encoding="utf-8")
    yield from absent(page, SOURCE)
    yield from layers(page, LAYERS)
