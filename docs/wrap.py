"""Wraps the prose of pages at 120 columns: `python docs/wrap.py` rewrites README.md, docs/ and design/ where a line is
wider. Tables, headings, code, and a single word that is wider (a link's address) stay as they are. Indented code of
README.md and docs/ becomes a block with a language, `text` or `toml`; write `python` or `sh` where it is that.

    python docs/wrap.py [PAGE ...]
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path

WIDTH = 120
PROSE, CODE, FIXED = "prose", "code", "fixed"
ROOT = Path(__file__).resolve().parents[1]
BULLET = re.compile(r"(\s*)([-*+]|\d+[.)])\s+")
ATOM = re.compile(r"`[^`\n]+`|!?\[[^\]\n]*\]\([^)\s]*\)")
"""Inline code and links: neither is broken where it fits into a line."""

MARKER = re.compile(r"([-*+>|]|\d+[.)]|#+|=+|-+)$")
"""A word that would begin a list, a heading or a quotation at the start of a line."""


def pages(root: Path) -> list[Path]:
    """Return the pages whose prose is wrapped: all but the log, which is history."""
    return sorted([root / "README.md", *root.glob("docs/**/*.md"), *root.glob("design/*.md")])


def wide_lines(text: str) -> list[int]:
    """Return the numbers of the lines of prose that are wider than 120 columns and could be broken."""
    return [
        number
        for number, line, kind in _lines(text)
        if kind == PROSE and len(line) > WIDTH and len(_words(BULLET.sub("", line, 1))) > 1
    ]


def wrapped(text: str) -> str:
    """Return a page with every paragraph that has too wide a line filled anew."""
    wide, result, paragraph = set(wide_lines(text)), [], []
    for number, line, kind in [*_lines(text), (0, "", FIXED)]:
        prose = kind == PROSE
        begins = bool(BULLET.match(line)) or not prose
        if paragraph and begins:
            result += _filled(paragraph, wide)
            paragraph = []
        if prose:
            paragraph.append((number, line))
        elif number:
            result.append(line)
    return "\n".join(result) + ("\n" if text.endswith("\n") else "")


def indented_code(text: str) -> list[int]:
    """Return the numbers of the lines of code that is indented, and so has no language."""
    return [number for number, _, kind in _lines(text) if kind == CODE]


def fenced(text: str) -> str:
    """Return a page with every block of indented code between fences that name a language."""
    result: list[str] = []
    block: list[str] = []
    for _, line, kind in [*_lines(text), (0, "end", FIXED)]:
        if kind == CODE or (block and not line.strip()):
            block.append(line.removeprefix("    "))
            continue
        if block:
            code = "\n".join(block).rstrip()
            language = "toml" if re.match(r"\[[\w.\[]+\]$", block[0]) else "text"
            result += [f"```{language}", code, "```", *[""] * (len(block) - code.count("\n") - 1)]
            block = []
        result.append(line)
    return "\n".join(result[:-1]) + ("\n" if text.endswith("\n") else "")


def _lines(text: str) -> list[tuple[int, str, str]]:
    """Return number, line and kind (prose, indented code, fixed) of every line."""
    lines, fenced, in_list, blank, code, comment = [], False, False, True, False, False
    for number, line in enumerate(text.removesuffix("\n").split("\n"), 1):
        fence = line.lstrip().startswith("```")
        if fence:
            fenced = not fenced
        comment = comment or line.startswith("<!--")
        kind = FIXED
        if not line.strip():
            blank = True
        elif fence or fenced or comment or line.startswith(("|", "#", "!", "<")):
            in_list, blank, code = in_list and fenced, False, False
        else:
            bullet, indented = BULLET.match(line), line.startswith("    ")
            code = indented and (code or blank) and not in_list
            in_list = (in_list and (indented or not blank or line.startswith(" "))) or bool(bullet and not code)
            blank, kind = False, CODE if code else PROSE
        comment = comment and "-->" not in line
        lines.append((number, line, kind))
    return lines


def _filled(paragraph: list[tuple[int, str]], wide: set[int]) -> list[str]:
    """Return the lines of a paragraph: filled anew where one of them is too wide, else unchanged."""
    lines = [line for _, line in paragraph]
    if not wide & {number for number, _ in paragraph}:
        return lines
    bullet = BULLET.match(lines[0])
    first = bullet.group(0) if bullet else lines[0][: len(lines[0]) - len(lines[0].lstrip())]
    rest = " " * len(first)
    words = _words(" ".join([lines[0].removeprefix(first), *lines[1:]]))
    return _fill(words, first, rest)


def _fill(words: list[str], first: str, rest: str) -> list[str]:
    filled, line = [], first + words[0]
    for word in words[1:]:
        if len(line) + 1 + len(word) > WIDTH:
            filled.append(line)
            line = rest + word
        else:
            line += f" {word}"
    return [*filled, line]


def _words(text: str) -> list[str]:
    """Split at spaces that stand neither in inline code nor in a link, but for those wider than a line. A word that
    may not begin a line stays with the one before it."""
    hidden = ATOM.sub(lambda atom: atom[0].replace(" ", "\0") if len(atom[0]) < WIDTH - 20 else atom[0], text)
    words: list[str] = []
    for word in hidden.split():
        if words and MARKER.match(word):
            words[-1] += f" {word}"
        else:
            words.append(word)
    return [word.replace("\0", " ") for word in words]


def write(folder: Path, pages: Mapping[str, str]) -> None:
    """Write all pages of a folder by their file names, and remove what is no page of it."""
    for file in set(folder.glob("*.md")) - {folder / name for name in pages}:
        file.unlink()
    for name, text in pages.items():
        folder.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")


def main() -> None:
    """Rewrite the pages that are named, or all."""
    for page in map(Path, sys.argv[1:]) if sys.argv[1:] else pages(ROOT):
        text = page.read_text(encoding="utf-8")
        new = wrapped(text) if "design" in page.parts else wrapped(fenced(text))
        if new != text:
            page.write_text(new, encoding="utf-8")
            print(page)


if __name__ == "__main__":
    main()
