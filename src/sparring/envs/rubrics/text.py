"""Scores of an answer's text: pure functions of (part, answer, column), run by `workers` in processes of their own.

Each function's docstring has its formula. All values are from 0 to 1.
"""

from __future__ import annotations

import datetime
import json
import math
import re
import string
from collections.abc import Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any

from sparring.envs.rubrics.config import Exact, Fuzzy, Json, Mathematics, Number, Regex
from sparring.envs.rubrics.numbers import final, number, whole_number
from sparring.errors import BadInput, boundary, refusal
from sparring.validation import read_json

NOTHING = {"none", "null", "nan", "n/a", "<na>"}
"""Spellings of a missing value in tables and programs."""

Text = Exact | Fuzzy | Number | Mathematics | Regex | Json


def last_match(pattern: str, text: str) -> str | None:
    """Return the last match of `pattern` (its first group, if it has one), stripped; None without a match. An empty
    pattern matches the whole text."""
    if not pattern:
        return text.strip()
    last = None
    for match in re.finditer(pattern, text):
        last = match
    matched = None if last is None else last[1] if last.re.groups else last[0]
    return None if matched is None else matched.strip()


def targets_of(part: Text, row: Mapping[str, Any]) -> Any:
    """Return the values of the row to compare with; None for a part without a column.

    Raises:
        BadInput: the column is missing, or its value is unsuitable or cannot be read completely.
    """
    column = getattr(part, "column", "")
    if not column or isinstance(part, Regex):
        return None
    where = f"column {column}"
    if column not in row:
        raise refusal(where, "a column of this name", ", ".join(sorted(row)), "correct the part's column")
    value = row[column]
    if isinstance(part, Json):
        return _fields(part, value)
    options = list(value) if isinstance(value, (list, tuple)) else [value]
    texts = [last_match(part.column_find, _to_text(option)) if _is_scalar(option) else None for option in options]
    if not texts or not all(texts):
        remedy = "correct the row, or column_find"
        raise refusal(where, "a text, number or list to compare with", repr(value)[:80], remedy)
    if isinstance(part, (Number, Mathematics)) and not part.column_find:
        texts = [final(text or "") for text in texts]
    for text in texts:
        _check_target(part, text or "", where)
    return texts


def _is_scalar(value: Any) -> bool:
    """Return True if a value is a text, a number or a date; a table's missing values are not."""
    if isinstance(value, (float, Decimal)):
        return math.isfinite(value)
    return isinstance(value, (str, int, datetime.date, datetime.time))


def _to_text(value: Any) -> str:
    return json.dumps(value) if isinstance(value, bool) else str(value)


def _check_target(part: Exact | Fuzzy | Number | Mathematics, text: str, where: str) -> None:
    """Refuse a right answer that the part cannot read completely. Formulas are only checked for spellings of a missing
    value here; `Workers.unread` parses them."""
    remedy = "correct the row, pick what counts with column_find, or take another kind"
    if isinstance(part, Number) and whole_number(text) is None:
        raise refusal(where, "a number and nothing beside it", repr(text)[:80], f"{remedy} (math reads formulas)")
    if isinstance(part, Mathematics) and text.casefold() in NOTHING:
        raise refusal(where, "a formula, a number or a set of them", repr(text)[:80], remedy)
    if isinstance(part, Exact) and not normal(text, part.case, part.punctuation):
        raise refusal(where, "a text that is more than punctuation", repr(text)[:80], "set punctuation = true")


def worth(part: Text, completion: str, target: Any) -> float:
    """Return the value of an answer, from 0 to 1. `target` is the result of `targets_of`."""
    text = last_match(part.find, completion)
    if text is None:
        return 0.0
    if isinstance(part, Regex):
        return float(bool((re.fullmatch if part.whole else re.search)(part.pattern, text)))
    if isinstance(part, Json):
        return json_worth(part, text, target)
    return max(_compare(part, text, option) for option in target)


def _compare(part: Exact | Fuzzy | Number | Mathematics, text: str, target: str) -> float:
    if isinstance(part, Exact):
        return float(normal(text, part.case, part.punctuation) == normal(target, part.case, part.punctuation))
    if isinstance(part, Fuzzy):
        similar = similarity(normal(text, False, True), normal(target, False, True), part.unit)
        return similar if part.at_least is None else float(similar >= part.at_least)
    if isinstance(part, Number):
        answered, right = number(text), whole_number(target)
        return float(
            answered is not None
            and right is not None
            and abs(answered - right) <= abs(right) * Fraction(part.tolerance)
        )
    from sparring.envs.rubrics.mathematics import equal

    return float(equal(text, target))


def normal(text: str, case: bool, punctuation: bool) -> str:
    """Return a text in a form for comparison: single blanks, and without case or ASCII punctuation unless they
    count."""
    if not punctuation:
        text = text.translate(str.maketrans("", "", string.punctuation))
    text = " ".join(text.split())
    return text if case else text.casefold()


def similarity(a: str, b: str, unit: str = "characters") -> float:
    """Return 2 L / (m + n), where L is the length of the longest common subsequence of m and n characters or words: 1
    for equal texts, 0 for texts that share nothing. Two empty texts are equal."""
    left: Sequence[str] = a.split() if unit == "words" else a
    right: Sequence[str] = b.split() if unit == "words" else b
    if not left and not right:
        return 1.0
    return 2 * common_subsequence(left, right) / (len(left) + len(right))


def common_subsequence(a: Sequence[str], b: Sequence[str]) -> int:
    """Return the length of the longest common subsequence (H. Hyyrö, "Bit-parallel LCS-length computation revisited",
    2004). The bits of the integer V are a row of the dynamic-programming table. For each element of b with the places M
    in a, V <- (V + (V & M)) | (V & ~M). The length is the number of zeros of V."""
    places: dict[str, int] = {}
    for index, element in enumerate(a):
        places[element] = places.get(element, 0) | 1 << index
    full = (1 << len(a)) - 1
    row = full
    for element in b:
        match = row & places.get(element, 0)
        row = ((row + match) | (row - match)) & full
    return len(a) - row.bit_count()


def json_worth(part: Json, text: str, target: Any) -> float:
    """Return the value of a JSON answer. Text that is not JSON, repeats a key of an object or does not match the schema
    is worth 0. Any other text is worth the share of fields that equal the target's; without `partial`, it is worth 1 if
    all are equal and 0 if not; without a target, 1. Equality is JSON's: 1 equals 1.0, but not true."""
    try:
        value = read_json(text, unique=True)
    except ValueError:
        return 0.0
    if part.schema:
        import jsonschema

        if not jsonschema.validators.validator_for(part.schema)(part.schema).is_valid(value):
            return 0.0
    if target is None:
        return 1.0
    right = [_json_equal(_field_at(value, path), inner) for path, inner in target]
    return sum(right) / len(right) if part.partial else float(all(right))


def _fields(part: Json, value: Any) -> list[tuple[str, Any]]:
    where, column_value = f"column {part.column}", value
    if isinstance(value, str):
        with boundary(BadInput, where, "JSON", "correct the row"):
            value = read_json(value, unique=True)
    if not isinstance(value, dict) or not value:
        raise refusal(where, "an object with fields", repr(column_value)[:80], "correct the row")
    with boundary(BadInput, where, "JSON", "correct the row"):
        written = json.dumps(value, allow_nan=False)
    targets = [(path, _field_at(value, path)) for path in part.fields or tuple(value)]
    missing = [path for path, target in targets if target is _NOTHING]
    if missing:
        raise refusal(where, f"a field {missing[0]!r}", ", ".join(value), "correct the row, or the part's fields")
    if json_worth(part, written, targets) != 1:
        remedy = "correct the row, or the part's schema"
        raise refusal(where, "an object of the part's own schema", written[:80], remedy)
    return targets


_NOTHING = object()


def _field_at(value: Any, path: str) -> Any:
    """Return the field with this name, else the nested field of a path `a.b`."""
    for name in (path,) if isinstance(value, dict) and path in value else path.split("."):
        if not isinstance(value, dict) or name not in value:
            return _NOTHING
        value = value[name]
    return value


def _json_equal(a: Any, b: Any) -> bool:
    """Compare JSON values; Python's equality would take true for 1."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_json_equal(a[name], b[name]) for name in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_json_equal, a, b))
    return bool(a == b)
