"""The site of the pages: `make docs` builds it, every page is in its navigation, and its links lead somewhere."""

import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SITE = runpy.run_path(str(ROOT / "docs" / "build_site.py"))


def test_every_page_is_in_the_navigation_once() -> None:
    shown = [page for pages in SITE["navigation"](ROOT).values() for page in pages]
    pages = {path.relative_to(ROOT).as_posix() for path in [*ROOT.glob("docs/**/*.md"), *ROOT.glob("design/*.md")]} | {
        "README.md",
        "CHANGELOG.md",
    }
    assert len(shown) == len(set(shown)) and set(shown) == pages
    assert SITE["site_config"](ROOT)["project"]["nav"][0]["Start"][0] == {"Sparring": "index.md"}


def test_links_are_rewritten_for_the_site(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "src").mkdir()
    (tmp_path / "src/a.py").write_text("one = 1\n")
    (tmp_path / "README.md").write_text("# R\n[a](docs/a.md#b)")
    (tmp_path / "docs/a.md").write_text("# A\n[up](../README.md) [b](#b) [s](../src/a.py#L1) [w](https://a.b/c)")
    out = tmp_path / "out"
    assert SITE["rewritten"](tmp_path, out, "README.md") == "# R\n[a](docs/a.md#b)"
    expected = "# A\n[up](../index.md) [b](#b) [s](../src/a.py.md#__codelineno-0-1) [w](https://a.b/c)"
    assert SITE["rewritten"](tmp_path, out, "docs/a.md") == expected
    assert "one = 1" in (out / "src/a.py.md").read_text()
    (tmp_path / "docs/a.md").write_text("# A\n[n](none.md)")
    with pytest.raises(ValueError, match="docs/a.md: none.md is no file"):
        SITE["rewritten"](tmp_path, out, "docs/a.md")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The repository's pages and source, without what git ignores."""
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    for name in filter(None, files):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, tmp_path / name)
    return tmp_path


def built(folder: Path) -> int:
    return subprocess.run([sys.executable, "docs/build_site.py"], cwd=folder, check=False).returncode


@pytest.mark.extra
def test_the_site_is_built_and_refuses_a_wrong_anchor(copy: Path) -> None:
    assert built(copy) == 0
    page = (copy / "build/site/docs/reference/Engine/index.html").read_text()
    assert 'id="generate"' in page and "Sample replies to prompts" in page
    assert (copy / "build/site/index.html").is_file()
    page = copy / "docs" / "limits.md"
    text = page.read_text()
    page.write_text(f"{text}\n[x](path/loss.md#no-such-heading)\n")
    assert built(copy) != 0
