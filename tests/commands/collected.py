"""Commands that pages and the heads of recipes name."""

from __future__ import annotations

import re
import shlex
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "log/NEXT.md", *sorted(ROOT.glob("docs/**/*.md"))]
RECIPES = sorted(file for kind in ("toml", "py") for file in ROOT.glob(f"recipes/**/*.{kind}"))
PROGRAMS = ("sparring", "python", "python3", "make")

FENCE = re.compile(r"^ *```(.*)\n((?:.*\n)*?) *```$", re.MULTILINE)
INLINE = re.compile(r"(?<!`)`([^`]+)`(?!`)")


def commands() -> dict[str, list[str]]:
    """Return where each command is named, by its text with single spaces and without comments."""
    found: dict[str, list[str]] = defaultdict(list)
    for file in (*PAGES, *RECIPES):
        read = of_page if file.suffix == ".md" else of_head
        for text in read(file.read_text(encoding="utf-8")):
            found[text].append(file.relative_to(ROOT).as_posix())
    return dict(sorted(found.items()))


def of_page(text: str) -> Iterator[str]:
    """Yield the commands of a page: lines between fences, and code in a sentence or table."""
    for language, block in FENCE.findall(text):
        if language in ("sh", "text"):
            yield from _lines(block.replace("\\\n", " "), whole=language == "sh")
    yield from _inline(FENCE.sub("", text))


def of_head(text: str) -> Iterator[str]:
    """Yield the commands of the comment or docstring that a recipe begins with: code, and lines of their own, which
    may have words behind several spaces."""
    head = re.match(r'"""((?:.|\n)*?)"""' if text.startswith('"') else r"((?:#.*\n)*)", text)
    told = re.sub(r"^#", "", head[1] if head else "", flags=re.MULTILINE)
    yield from _inline(told)
    yield from _lines(re.sub(r"(?<=\S) {3,}.*", "", told))


def _inline(text: str) -> Iterator[str]:
    for code in INLINE.findall(text):
        yield from _lines(" ".join(code.split()))


def _lines(text: str, *, whole: bool = False) -> Iterator[str]:
    """Yield the lines that are commands, with single spaces: those that begin with one of the programs or with what
    starts it (`srun`, `kubectl exec`), and with `whole` those that hold it anywhere."""
    for line in text.splitlines():
        try:
            words = shlex.split(line, comments=True)
        except ValueError:  # an apostrophe
            continue
        begins = bool(words) and words[0] in PROGRAMS
        if words[1:] and (begins or (whole or words[0] in ("srun", "kubectl")) and set(PROGRAMS[:3]) & set(words)):
            yield shlex.join(words)
