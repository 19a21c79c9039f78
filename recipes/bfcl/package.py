"""The installed package bfcl-eval, which `make bfcl` brings into a folder with an interpreter of its own: what is read
of its files, and what is refused where they are not there. Nothing of it is imported here."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sparring.errors import BadInput, boundary, refusal

VERSION = "2026.3.23"
CATEGORIES = ("simple_python", "multiple", "parallel", "irrelevance", "live_simple", "live_irrelevance")
"""Single-turn categories whose functions are Python's."""


class Row(NamedTuple):
    """One task as BFCL has it. `answer`: for each call its function, and for each argument the values that are right;
    empty where no function fits."""

    id: str
    category: str
    question: str
    functions: Sequence[Mapping[str, Any]]
    answer: Sequence[Mapping[str, Mapping[str, Sequence[Any]]]]


class Package(NamedTuple):
    """The interpreter, and the folder of the data."""

    python: Path
    data: Path


def installed(folder: Path) -> Package:
    """Find the package in the folder of its interpreter.

    Raises:
        BadInput: it is not there, or another version is.
    """
    do = "run make bfcl"
    python = folder / "bin/python"
    found = sorted(folder.glob("lib/python*/site-packages/bfcl_eval-*.dist-info"))
    if not found:
        raise refusal(str(folder), f"the package bfcl-eval {VERSION} with an interpreter of its own", "none", do)
    version = found[0].name.removeprefix("bfcl_eval-").removesuffix(".dist-info")
    if version != VERSION:
        raise refusal(str(folder), f"bfcl-eval {VERSION}", version, f"remove the folder and {do}")
    if not python.exists():
        raise refusal(str(python), "the interpreter of bfcl-eval", "no such file", f"remove the folder and {do}")
    return Package(python.absolute(), found[0].parent / "bfcl_eval/data")


def rows(data: Path, category: str) -> list[Row]:
    """Read the tasks of a category that are one question of a user.

    Args:
        data: the package's folder of data.
        category: one of `CATEGORIES`.

    Raises:
        BadInput: a file is not there, or is of another form.
    """
    answers: dict[str, Any] = {}
    if "irrelevance" not in category:
        answers = {line["id"]: line["ground_truth"] for line in _lines(data / "possible_answer" / _file(category))}
    path, read = data / _file(category), []
    for line in _lines(path):
        with boundary(BadInput, f"{path}, {line['id']}", "a task of BFCL", "remove .bfcl and run make bfcl"):
            (conversation,) = line["question"]
            if [message["role"] for message in conversation] == ["user"] and line["function"]:
                question, answer = conversation[0]["content"], answers[line["id"]] if answers else ()
                read.append(Row(line["id"], category, question, line["function"], answer))
    return read


def _file(category: str) -> str:
    return f"BFCL_v4_{category}.json"


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    do = "remove .bfcl and run make bfcl"
    if not path.is_file():
        raise refusal(str(path), "a file of bfcl-eval", "no such file", do)
    with boundary(BadInput, str(path), "one JSON object with an id a line", do):
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        yield from sorted(lines, key=lambda line: (len(line["id"]), line["id"]))
