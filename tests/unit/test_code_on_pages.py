"""Every block of code on the pages of docs/ and in README.md says its language, and does what that language promises:
Python runs (`py`, signatures and examples of docs/reference, is only read), recipes load, commands are understood by the
program that they call."""

from __future__ import annotations

import ast
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from sparring import load_recipe
from sparring.cli.main import main, parser
from sparring.recipe.load import from_data

ROOT = Path(__file__).resolve().parents[2]
WRAP = runpy.run_path(str(ROOT / "docs" / "wrap.py"))
FENCE = re.compile(r"^```(.*)\n((?:.*\n)*?)```$", re.MULTILINE)
NAMED = re.compile(r"# (\S+\.\w+)$")
BASE = {"run": {"name": "x"}, "models": {"policy": {"path": "/x"}}, "env": {"name": "reasoning_gym"}}
TARGETS = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
RUN_ALL = """
import os, runpy, sys
for program in sys.argv[1:]:
    sys.path[0] = folder = os.path.dirname(program)
    os.chdir(folder)
    runpy.run_path(program, run_name="__main__")
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(folder):
            del sys.modules[name]
    print("ran", program)
"""
"""A program that runs others one after another; the next one imports nothing of the folder of the one before."""


class Block(NamedTuple):
    """One block of code: its page, its place on it, its language and its text."""

    page: str
    number: int
    language: str
    text: str

    @property
    def file(self) -> str | None:
        """The name that its first line gives it, where that is the name of a file."""
        name = NAMED.match(self.text.partition("\n")[0])
        return name[1] if name else None


def blocks(pages: list[Path]) -> list[Block]:
    return [
        Block(page.relative_to(ROOT).as_posix(), number, language, text)
        for page in pages
        for number, (language, text) in enumerate(FENCE.findall(page.read_text(encoding="utf-8")))
    ]


PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
BLOCKS = blocks(PAGES)


def in_language(*languages: str) -> list[pytest.param]:
    return [pytest.param(b, id=f"{b.page}-{b.number}") for b in BLOCKS if b.language in languages]


def test_every_block_says_its_language() -> None:
    assert not [f"{page}:{line}" for page in PAGES for line in WRAP["indented_code"](page.read_text())]
    assert {block.language for block in BLOCKS} == {"python", "py", "toml", "sh", "text", "jsonl"}
    assert all(page.read_text().count("\n```") % 2 == 0 for page in PAGES)


def test_indented_code_is_found_and_put_between_fences() -> None:
    page = "Text:\n\n    [algo]\n    preset = 1\n\n    a = 2\n\n- item\n\n    goes on\n\nEnd:\n\n    x -> y\n"
    assert WRAP["indented_code"](page) == [3, 4, 6, 14]
    fenced = WRAP["fenced"](page)
    assert "```toml\n[algo]\npreset = 1\n\na = 2\n```\n\n- item\n\n    goes on\n" in fenced
    assert fenced.endswith("```text\nx -> y\n```\n") and WRAP["fenced"](fenced) == fenced


def test_python_runs(tmp_path: Path) -> None:
    """Every block as a program, in a folder with all files that its page names; one process runs them all."""
    programs = []
    for block in BLOCKS:
        folder = tmp_path / block.page.replace("/", "_")
        if not folder.exists():
            folder.mkdir()
            (folder / "recipes").symlink_to(ROOT / "recipes")
        if block.file is not None:
            (folder / block.file).write_text(block.text)
        if block.language == "python":
            programs.append(str(folder / f"block_{block.number}.py"))
            Path(programs[-1]).write_text(block.text)
    command = [sys.executable, "-c", RUN_ALL, *programs]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    ran = [line.removeprefix("ran ") for line in done.stdout.splitlines() if line.startswith("ran ")]
    assert (done.returncode, ran) == (0, programs), done.stderr


@pytest.mark.parametrize("block", in_language("py"))
def test_signatures_and_examples_of_docstrings_are_python(block: Block) -> None:
    assert ast.parse(block.text).body and block.page.startswith("docs/reference/")


@pytest.mark.parametrize("block", in_language("toml"))
def test_a_recipe_loads(block: Block) -> None:
    """Beside the least that a recipe needs, where the block is a piece of one."""
    given = tomllib.loads(block.text)
    models = {**BASE["models"], **given.get("models", {})}
    least = {key: table for key, table in BASE.items() if key != "env" or "envs" not in given}
    assert from_data({**least, **given, "models": models}, block.page) != from_data(BASE, "least")


@pytest.mark.parametrize("block", in_language("jsonl"))
def test_rows_are_json(block: Block) -> None:
    rows = [msgspec.json.decode(line) for line in block.text.splitlines() if not line.startswith("#")]
    assert rows and all(isinstance(row, dict) for row in rows)


def commands(text: str) -> list[list[str]]:
    """Return the words of every command; lines that end in a backslash are joined."""
    lines = text.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def refused(words: list[str]) -> str:
    """Return what is wrong with a command, "" where nothing is."""
    program, *rest = words
    if program == "sparring":
        try:
            parser().parse_args(rest)
        except SystemExit as end:
            return "" if not end.code else "refused by sparring's arguments"
        rest = [word for word in rest if word.startswith("recipes/")]
    elif program == "make":
        return "" if set(rest) <= TARGETS else "no such target"
    elif program not in ("python", "pytest", "cd", "git", "pip", "sudo", "curl", "bash", "ray"):
        return "a program that this test does not know"
    paths = [word for word in rest if re.match(r"(recipes|benchmarks|docs|tests)/", word)]
    return ", ".join(f"{path} is not there" for path in paths if not (ROOT / path).exists())


@pytest.mark.parametrize("block", in_language("sh"))
def test_commands_are_understood(block: Block, capsys: pytest.CaptureFixture[str]) -> None:
    assert [(words, wrong) for words in commands(block.text) if (wrong := refused(words))] == []


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("sparring run recipes/quickstart.toml --steps 3", "refused by sparring's arguments"),
        ("sparring chek recipes/quickstart.toml", "refused by sparring's arguments"),
        ("sparring run recipes/none.toml # comment", "recipes/none.toml is not there"),
        ("make tests", "no such target"),
        ("python benchmarks/none.py", "benchmarks/none.py is not there"),
        ("ls -l", "a program that this test does not know"),
    ],
)
def test_a_wrong_command_is_found(line: str, wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert [refused(words) for words in commands(line)] == [wrong]


CHECKED = sorted(
    {w[2] for b in BLOCKS if b.language == "sh" for w in commands(b.text) if w[:2] == ["sparring", "check"]}
)
HERE = [name for name in CHECKED if (ROOT / name).is_file() and load_recipe(ROOT / name).models["policy"].path is None]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", HERE)
def test_a_recipe_that_a_page_checks_is_ready(recipe: str, tmp_path: Path) -> None:
    """Of those that need neither the hub nor a file of the reader's."""
    assert main(["check", str(ROOT / recipe), "--set", f"run.directory={tmp_path}"]) == 0
