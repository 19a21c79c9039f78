"""Type hints and docstrings -> tool schemas (golden), and what wrong arguments are told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Optional, TypedDict

import pytest

from sparring.envs.schema import arguments_type, checked, tool_spec
from sparring.errors import BadInput


@dataclass
class Point:
    x: int
    y: int = 0


class Place(TypedDict):
    name: str
    at: Point


def search(
    query: str,
    limit: int = 5,
    threshold: float = 0.5,
    exact: bool = False,
    tags: list[str] | None = None,
    order: Literal["new", "old"] = "new",
    filters: Optional[dict[str, int]] = None,  # noqa: UP045
) -> str:
    """Search the archive.
    Fast, in one sentence.

    More that the model need not read.

    Args:
        query: What to look for,
            in plain words.
        limit (int): Most results: a number.

    Returns:
        Not an argument: this.
    """
    return ""


def bare(place: Place, points: list[Point], either: int | str, anything: dict, both: Literal[1, "a"]) -> None:
    pass


def test_golden_schema_of_scalars_defaults_and_descriptions() -> None:
    spec = tool_spec(search)
    assert spec.name == "search"
    assert spec.description == "Search the archive. Fast, in one sentence."
    assert spec.parameters == {
        "type": "object",
        "properties": {
            "query": {"type": "string", "description": "What to look for, in plain words."},
            "limit": {"type": "integer", "default": 5, "description": "Most results: a number."},
            "threshold": {"type": "number", "default": 0.5},
            "exact": {"type": "boolean", "default": False},
            "tags": {"type": "array", "items": {"type": "string"}},
            "order": {"type": "string", "enum": ["new", "old"], "default": "new"},
            "filters": {"type": "object", "additionalProperties": {"type": "integer"}},
        },
        "required": ["query"],
    }


def test_golden_schema_of_records_unions_and_bare_containers() -> None:
    point = {"type": "object", "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}}, "required": ["x"]}
    spec = tool_spec(bare, name="other", description="")
    assert (spec.name, spec.description) == ("other", "")
    assert spec.parameters["properties"] == {
        "place": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "at": point},
            "required": ["name", "at"],
        },
        "points": {"type": "array", "items": point},
        "either": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
        "anything": {"type": "object"},
        "both": {"enum": [1, "a"]},
    }


def no_hint(x) -> None:  # type: ignore[no-untyped-def]
    pass


def unserialisable(x: set[int]) -> None:
    pass


def starred(*x: int) -> None:
    pass


@pytest.mark.parametrize(
    ("function", "said"),
    [(no_hint, "a type hint on 'x'"), (unserialisable, "parameter x: expected str"), (starred, r"\*x")],
)
def test_a_type_without_a_schema_is_refused(function: object, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        tool_spec(function)  # type: ignore[arg-type]


def test_arguments_are_converted_and_defaults_filled() -> None:
    arguments = checked({"query": "a", "threshold": 1}, arguments_type(search, "search"))
    assert arguments["threshold"] == 1.0
    assert arguments["limit"] == 5 and arguments["tags"] is None
    records = checked(
        {
            "place": {"name": "n", "at": {"x": 1}},
            "points": [{"x": 2, "y": 3}],
            "either": "e",
            "anything": {},
            "both": "a",
        },
        arguments_type(bare, "bare"),
    )
    assert records["points"] == [Point(2, 3)] and records["place"]["at"] == Point(1)


@pytest.mark.parametrize(
    ("arguments", "refusal"),
    [
        ({}, "query: expected a string"),
        ({"query": 3}, "query: expected a string"),
        ({"query": "a", "limit": "5"}, "limit: expected an integer"),
        ({"query": "a", "order": "odd"}, 'order: expected one of "new", "old"'),
        ({"query": "a", "depth": 1}, "depth: expected one of exact, filters, limit"),
        ({"query": "a", "tags": ["x", None]}, "tags.1: expected a string"),
    ],
)
def test_wrong_arguments_are_refused_at_their_place(arguments: dict[str, object], refusal: str) -> None:
    with pytest.raises(ValueError) as error:
        checked(arguments, arguments_type(search, "search"))
    assert str(error.value).startswith(refusal)
