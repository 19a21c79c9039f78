"""Parsing of a value between tags by the JSON types that its schema allows.

Between tags, text is written verbatim and other values as JSON, so only the schema tells text from JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparring.render.calls.schemas import Schema, kinds_of_value
from sparring.validation import read_json

PYTHON_WORDS: Mapping[str, Any] = {"True": True, "False": False, "None": None}
"""Python literals that some templates write instead of JSON's."""


def value_of(written: str, schema: Any, root: Schema, words: Mapping[str, Any]) -> Any:
    """Parse the text between two tags.

    If the schema allows only text, the value is the text. If it allows text and other types, the value is JSON if the
    text has no blanks at its ends and parses to one of the other types, or else the text. If it allows no text, the
    value is JSON.

    Args:
        words: literals of the format that are not JSON, with their values.

    Raises:
        ValueError: the schema allows no text, and `written` is not JSON.
    """
    kinds = root.kinds(schema)
    if kinds == {"string"}:
        return written
    textual = "string" in kinds
    if textual and written != written.strip():
        return written
    try:
        value = words[written.strip()] if written.strip() in words else read_json(written)
    except ValueError as cause:
        if textual:
            return written
        raise ValueError("no JSON") from cause
    return written if textual and (isinstance(value, str) or not kinds & kinds_of_value(value)) else value
