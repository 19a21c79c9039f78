"""Builds the site of these pages into build/site: `make docs`.

    python docs/build_site.py

The pages are copied into build/pages, each at its path in the repository; README.md is the front page. A source file
that a page links to becomes a page itself, so that the site needs no other host. zensical builds it and stops at a
link that leads nowhere.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import tomli_w

ROOT = Path(__file__).resolve().parents[1]
PAGES, CONFIG = ROOT / "build" / "pages", ROOT / "build" / "zensical.toml"
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)(#[^)\s]+)?\)")
LANGUAGES = {".py": "python", ".toml": "toml", ".cpp": "cpp", ".jsonl": "json"}

SECTIONS = {
    "Start": (
        *("README.md", "docs/quickstart.md", "docs/real.md", "docs/bfcl.md", "docs/tutorial.md", "docs/recipes.md"),
        *("docs/from-trl.md", "docs/from-verl.md", "docs/glossary.md"),
    ),
    "Python": ("docs/reference/*.md",),
    "Extend": ("docs/extend/*.md",),
    "The path of a token": ("docs/path/one-token.md", "docs/path/*.md"),
    "Parts": ("docs/*.md",),
    "Configuration": ("docs/configuration/*.md",),
    "Algorithms": ("docs/algorithms/*.md",),
    "Engine": ("docs/engine/*.md",),
    "Measured": ("docs/benchmarks.md", "docs/performance.md", "docs/learning.md", "docs/limits.md"),
    "Design": ("design/architecture.md", "design/*.md", "CHANGELOG.md"),
}
"""The navigation: pages or patterns by section; a page that is named stands nowhere else, first match first."""


def navigation(root: Path) -> dict[str, list[str]]:
    """Return the pages of every section, as paths from the root.

    Raises:
        ValueError: a page that is named is not there.
    """
    named = {name for patterns in SECTIONS.values() for name in patterns if "*" not in name}
    seen: set[str] = set()
    sections = {}
    for title, patterns in SECTIONS.items():
        pages: list[str] = []
        for pattern in patterns:
            matches = sorted(path.relative_to(root).as_posix() for path in root.glob(pattern))
            if not matches:
                raise ValueError(f"docs/build_site.py: {pattern} in SECTIONS matches no page")
            pages += [page for page in matches if page not in seen and (page == pattern or page not in named)]
            seen |= set(pages)
        sections[title] = (
            sorted(pages, key=lambda page: not page.endswith("/index.md")) if "*" in patterns[0] else pages
        )
    return sections


def copy_pages(root: Path, target: Path) -> None:
    """Copy every page of the navigation, what its links lead to, and pictures."""
    for page in (page for pages in navigation(root).values() for page in pages):
        written = target / site_path(page)
        written.parent.mkdir(parents=True, exist_ok=True)
        written.write_text(rewritten(root, target, page), encoding="utf-8")


def rewritten(root: Path, target: Path, page: str) -> str:
    """Return a page's text with its links as the site needs them; what they lead to is copied.

    Raises:
        ValueError: a link leads to no file.
    """

    def link(match: re.Match[str]) -> str:
        name, anchor = match[1], match[2] or ""
        file = (root / page).parent.joinpath(name).resolve()
        if not file.is_file():
            raise ValueError(f"{page}: {name} is no file")
        inside = file.relative_to(root).as_posix()
        shown = site_path(inside)
        if file.suffix in (".png", ".svg"):
            (target / shown).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target / shown)
        elif file.suffix != ".md" or inside.startswith("log/"):
            anchor = anchor.replace("#L", "#__codelineno-0-")
            show_source(file, inside, target / shown)
        up = "../" * site_path(page).count("/")
        return f"]({up}{shown}{anchor})"

    return LINK.sub(link, (root / page).read_text(encoding="utf-8"))


def site_path(inside: str) -> str:
    """Return where a file of the repository stands in the site's pages."""
    if inside == "README.md":
        return "index.md"
    return inside if inside.endswith((".md", ".png", ".svg")) else f"{inside}.md"


def show_source(file: Path, inside: str, target: Path) -> None:
    """Write a page that shows a file of the repository, its lines numbered."""
    target.parent.mkdir(parents=True, exist_ok=True)
    text = file.read_text(encoding="utf-8").rstrip("\n")
    language = LANGUAGES.get(file.suffix, "text")
    head = f"---\nsearch:\n  exclude: true\n---\n\n# `{inside}`\n\n"
    target.write_text(f'{head}``````{language} linenums="1"\n{text}\n``````\n', encoding="utf-8")


def title(root: Path, page: str) -> str:
    """Return the heading of a page."""
    heading = re.search(r"^# (.+)$", (root / page).read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert heading is not None, f"{page} has no heading"
    return heading[1].replace("`", "")


def site_config(root: Path) -> dict[str, object]:
    """Return zensical's settings."""
    package = (root / "src/sparring/__init__.py").read_text(encoding="utf-8")
    (version,) = re.findall(r'^__version__ = "(.+)"$', package, flags=re.MULTILINE)
    sections = navigation(root).items()
    nav = [{name: [{title(root, page): site_path(page)} for page in pages]} for name, pages in sections]
    return {
        "project": {
            "site_name": "Sparring",
            "site_description": f"Train language-model agents with reinforcement learning. Version {version}.",
            "docs_dir": "pages",
            "site_dir": "site",
            "nav": nav,
            "plugins": {"search": {}},
            "markdown_extensions": {
                "attr_list": {},
                "tables": {},
                "toc": {"permalink": True},
                "pymdownx": {
                    "highlight": {"anchor_linenums": True, "line_spans": "__span"},
                    "superfences": {},
                    "inlinehilite": {},
                },
            },
        }
    }


def main() -> int:
    """Write the pages and build the site; return zensical's exit status."""
    shutil.rmtree(PAGES, ignore_errors=True)
    PAGES.mkdir(parents=True)
    copy_pages(ROOT, PAGES)
    CONFIG.write_text(tomli_w.dumps(site_config(ROOT)), encoding="utf-8")
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean", "-f", str(CONFIG)]
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
