"""What texts are worth: each formula by hand."""

from __future__ import annotations

import itertools
import random
from fractions import Fraction
from typing import Any

import msgspec
import pytest

from sparring.envs.rubrics.config import Part
from sparring.envs.rubrics.numbers import number
from sparring.envs.rubrics.text import common_subsequence, last_match, similarity, targets_of, worth
from sparring.errors import BadInput


def value(completion: str, row: dict[str, Any], **part: Any) -> float:
    checked = msgspec.convert(part, Part)
    return worth(checked, completion, targets_of(checked, row))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The answer is 18.", "18"),
        ("$1,234.50", "1234.5"),
        ("16-3", "3"),
        ("it fell to -3", "-3"),
        ("it cost -$5", "-5"),
        ("\N{MINUS SIGN}7", "-7"),
        ("3/4", "3/4"),
        ("6.5e2", "650"),
        (".5", "1/2"),
        ("1, 2", "2"),
        ("1,2345", "2345"),
        ("no number", None),
        ("1e999999", None),
        ("1/0", None),
    ],
)
def test_the_last_number_of_a_text(text: str, expected: str | None) -> None:
    assert number(text) == (None if expected is None else Fraction(expected))


def test_the_last_match_counts_and_of_it_the_first_group() -> None:
    assert last_match("#### (.+)", "#### 1\n#### 2 ") == "2"
    assert last_match("[a-z]+", "ab 1 cd") == "cd"
    assert last_match("(a)|b", "a b") is None, "the group took no part"
    assert last_match("x", "a") is None and last_match("", " a ") == "a"


def test_exact() -> None:
    row = {"answer": ["New York", "NYC"]}
    assert value("  new   york ", row, kind="exact") == 1
    assert value("nyc", row, kind="exact", case=True) == 0
    assert value("New York.", row, kind="exact") == 0
    assert value("New York.", row, kind="exact", punctuation=False) == 1


def test_the_longest_common_subsequence_is_the_textbooks() -> None:
    draw = random.Random(5)
    for _ in range(200):
        a, b = ("".join(draw.choices("abc", k=draw.randint(0, 9))) for _ in range(2))
        table = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
        for i, j in itertools.product(range(len(a)), range(len(b))):
            table[i + 1][j + 1] = table[i][j] + 1 if a[i] == b[j] else max(table[i][j + 1], table[i + 1][j])
        assert common_subsequence(a, b) == table[-1][-1], (a, b)


def test_fuzzy() -> None:
    assert similarity("abcd", "abd") == 6 / 7
    assert similarity("the cat sat", "the dog sat", "words") == 4 / 6
    assert similarity("", "") == 1 and similarity("a", "") == 0
    row = {"answer": "kitten"}
    assert value("Sitting", row, kind="fuzzy") == 8 / 13
    assert value("Sitting", row, kind="fuzzy", at_least=0.6) == 1
    assert value("Sitting", row, kind="fuzzy", at_least=0.62) == 0


def test_number_within_its_tolerance() -> None:
    assert value("about 102", {"answer": 100}, kind="number") == 0
    assert value("about 102", {"answer": 100}, kind="number", tolerance=0.03) == 1
    assert value("1/3", {"answer": "0.3333"}, kind="number") == 0, "a fraction is exact"
    assert value("none", {"answer": 0}, kind="number") == 0


def test_a_right_answer_counts_whole() -> None:
    """A gold of LaTeX is read as its number, and true is written as JSON writes it."""
    assert value("0.5", {"answer": r"\frac{1}{2}"}, kind="number") == 1
    assert value(r"it is \frac{1}{2}", {"answer": r"\frac{1}{2}"}, kind="number") == 1
    assert value("2", {"answer": r"\frac{1}{2}"}, kind="number") == 0
    assert value("true", {"answer": True}, kind="exact", case=True) == 1


def test_regex() -> None:
    assert value("a b", {}, kind="regex", pattern="b") == 1
    assert value("a b", {}, kind="regex", pattern="b", whole=True) == 0
    assert value("<think>no</think> yes", {}, kind="regex", pattern="no", find="</think>(.*)") == 0


SCHEMA = {"type": "object", "required": ["name"], "properties": {"age": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("text", "expected"),
    [('{"name": 1}', 1), ('{"age": 1}', 0), ('{"name": 1, "age": "x"}', 0), ("{", 0), ('{"name": NaN}', 0), ('{"name": 1, "name": 2}', 0)],
)  # fmt: skip
def test_json_of_a_schema(text: str, expected: float) -> None:
    assert value(text, {}, kind="json", schema=SCHEMA) == expected


def test_json_fields() -> None:
    row = {"answer": {"a": 1, "b": {"c": [1, True]}, "d": "x"}}
    right, half = '{"b": {"c": [1.0, true]}, "a": 1, "d": "x"}', '{"a": 1, "b": {"c": [1, 1]}, "d": "y"}'
    assert value(right, row, kind="json", column="answer") == 1
    assert value(half, row, kind="json", column="answer") == 0
    assert value(half, row, kind="json", column="answer", partial=True) == 1 / 3
    assert value(half, row, kind="json", column="answer", fields=("a",)) == 1
    assert value(right, row, kind="json", column="answer", fields=("b.c",)) == 1
    assert value(half, row, kind="json", column="answer", fields=("b.c",)) == 0, "1 is not true"
    assert value("[]", row, kind="json", column="answer", partial=True) == 0
    assert value(f"So:\n```json\n{right}\n```", row, kind="json", column="answer", find=r"(?s)```json\n(.*?)```") == 1


@pytest.mark.parametrize(
    ("part", "row", "said"),
    [
        ({"kind": "exact"}, {"solution": "1"}, "column answer: expected a column"),
        ({"kind": "exact"}, {"answer": []}, "a text, number or list to compare with"),
        ({"kind": "exact", "column_find": "#### (.+)"}, {"answer": "18"}, "a text, number or list to compare with"),
        ({"kind": "exact"}, {"answer": None}, "a text, number or list to compare with"),
        ({"kind": "fuzzy"}, {"answer": ["a", float("nan")]}, "a text, number or list"),
        ({"kind": "exact"}, {"answer": {"a": 1}}, "a text, number or list"),
        ({"kind": "exact", "punctuation": False}, {"answer": "?!"}, "more than punctuation"),
        ({"kind": "math"}, {"answer": "N/A"}, "expected a formula"),
        ({"kind": "number"}, {"answer": "many"}, "expected a number"),
        ({"kind": "number"}, {"answer": "(1, 2)"}, "expected a number and nothing beside it"),
        ({"kind": "number"}, {"answer": [1, True]}, "expected a number"),
        ({"kind": "json", "column": "answer"}, {"answer": '{"a": NaN}'}, "expected JSON"),
        ({"kind": "json", "column": "answer"}, {"answer": '{"a": 1, "a": 2}'}, "expected JSON"),
        ({"kind": "json", "column": "answer", "schema": {"required": ["b"]}}, {"answer": {"a": 1}}, "schema"),
        ({"kind": "json", "column": "answer"}, {"answer": "{"}, "expected JSON"),
        ({"kind": "json", "column": "answer"}, {"answer": "[1]"}, "an object with fields"),
        ({"kind": "json", "column": "answer", "fields": ("a.b",)}, {"answer": {"a": 1}}, "a field 'a.b'"),
    ],
)
def test_a_row_without_a_usable_target_is_refused(part: dict[str, Any], row: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        targets_of(msgspec.convert(part, Part), row)
