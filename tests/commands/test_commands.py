"""Each command that a page names runs, in a form of seconds, or stands in elsewhere.toml with its reason."""

from __future__ import annotations

import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from collected import ROOT, commands, of_head, of_page
from image_files import open_folder
from place import INSTEAD, WORDS, Place

from sparring.cli.main import main

COMMANDS = commands()
ELSEWHERE = tomllib.loads(Path(__file__).with_name("elsewhere.toml").read_text(encoding="utf-8"))
LISTED = {text for entry in ELSEWHERE.values() for text in entry["commands"]}
TARGETS = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
PLACEHOLDER = re.compile("[A-Z]{2}")
WHOLE = ("sparring image list", "sparring sandbox doctor")
"""Commands that work on nothing that they name."""
FILE = re.compile(r"(?<![\w./-])(?:tests|benchmarks|recipes|docs)/[\w./-]*\w")


def is_mention(text: str) -> bool:
    """Return whether a text names a program or a verb alone, without what it works on."""
    program, *rest = shlex.split(text)
    if program.startswith("python"):
        return all(word.startswith("-") for word in rest)
    return program == "sparring" and text not in WHOLE and all(re.fullmatch("[a-z]+", word) for word in rest)


MADE = [text for text in COMMANDS if text.startswith("make ")]
MENTIONED = [text for text in COMMANDS if is_mention(text)]
RUN = [text for text in COMMANDS if text not in {*MADE, *MENTIONED, *LISTED}]


def test_all_commands_are_found() -> None:
    page = (
        "See `sparring\nrun a.toml`.\n```sh\nsparring run b.toml \\\n    --name c   # why\nsrun python d.py\nls\n```\n"
    )
    assert list(of_page(page)) == ["sparring run b.toml --name c", "srun python d.py", "sparring run a.toml"]
    head = "# Words: `make real`.\n#     sparring run a.toml\n# python b.py c    says why\n\n[run]\n# `make no`\n"
    assert list(of_head(head)) == ["make real", "sparring run a.toml", "python b.py c"]
    assert list(of_head('"""Write it: `python a.py`."""\n`python b.py`')) == ["python a.py"]


def test_every_command_has_a_place() -> None:
    """What stands for something of the reader's is known, and no list has what no page says."""
    words = {word for text in RUN if text not in INSTEAD for word in shlex.split(text)}
    assert {word for word in words if PLACEHOLDER.search(word)} - WORDS.keys() == set()
    assert LISTED | INSTEAD.keys() <= COMMANDS.keys()
    assert {entry["target"] for entry in ELSEWHERE.values()} <= TARGETS | {"none"}
    assert all(entry["reason"] for entry in ELSEWHERE.values())


@pytest.mark.parametrize("text", MENTIONED)
def test_a_verb_that_is_mentioned_exists(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    program, *verbs = shlex.split(text)
    if program == "sparring":
        with pytest.raises(SystemExit) as end:
            main([*verbs, "--help"])
        assert end.value.code == 0 and f"usage: {text}" in capsys.readouterr().out


def test_every_file_of_a_target_exists() -> None:
    targets = {target for text in MADE for target in shlex.split(text)[1:]}
    done = subprocess.run(["make", "-n", "-B", *sorted(targets)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    named = set(FILE.findall(done.stdout))
    assert len(named) > 40 and {name for name in named if not (ROOT / name).exists()} == set()


@pytest.fixture(scope="session")
def place() -> Iterator[Place]:
    with open_folder() as folder:
        yield Place(folder)


@pytest.mark.commands
@pytest.mark.parametrize("text", RUN)
def test_it_runs(place: Place, text: str) -> None:
    place.run(text)
