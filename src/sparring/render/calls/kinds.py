"""JSON types that the schema of an argument allows, and the parsing of a value between tags by them.

Between tags, text is written verbatim and everything else as JSON, so only the schema tells them apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparring.validation import read_json

KINDS = frozenset(("null", "boolean", "integer", "number", "string", "array", "object"))
_TEXT = frozenset(("string",))
_DEEPEST = 16
"""Maximum number of references to follow; a longer chain counts as circular."""

PYTHON_WORDS: Mapping[str, Any] = {"True": True, "False": False, "None": None}
"""Python literals that some templates write instead of JSON's."""


def resolved(schema: Any, root: Any) -> Any:
    """Return the schema that a local reference (`#/$defs/name`) or an `allOf` with a single entry stands for; any other
    schema unchanged."""
    for _ in range(_DEEPEST):
        if not isinstance(schema, Mapping):
            break
        inner = schema.get("$ref")
        alone = schema.get("allOf")
        if isinstance(inner, str) and inner.startswith("#"):
            target = _pointed(root, inner)
        elif isinstance(alone, list) and len(alone) == 1 and isinstance(alone[0], Mapping):
            target = alone[0]
        else:
            break
        if target is None:
            break
        schema = {**target, **{key: value for key, value in schema.items() if key not in ("$ref", "allOf")}}
    return schema


def kinds_of(schema: Any, root: Any = None, depth: int = 0) -> frozenset[str]:
    """Return the JSON types that a schema allows: `number` includes `integer`; all types if the schema names none.

    Args:
        root: schema in which references are looked up.
    """
    schema = resolved(schema, root)
    if not isinstance(schema, Mapping) or depth > _DEEPEST:
        return KINDS
    kinds = KINDS
    named = schema.get("type")
    if isinstance(named, str) or isinstance(named, list) and named:
        types = {named} if isinstance(named, str) else set(map(str, named))
        kinds &= types | ({"integer"} if "number" in types else set())
    if "enum" in schema or "const" in schema:
        listed = schema.get("enum", [schema.get("const")])
        kinds &= frozenset().union(*map(kinds_of_value, listed)) if isinstance(listed, list) else KINDS
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list) and schema[key]:
            kinds &= frozenset().union(*(kinds_of(branch, root, depth + 1) for branch in schema[key]))
    for part in schema["allOf"] if isinstance(schema.get("allOf"), list) else ():
        kinds &= kinds_of(part, root, depth + 1)
    return kinds or KINDS  # a contradictory schema does not tell how its values are written


def kinds_of_value(value: Any) -> frozenset[str]:
    """Return the JSON types of a value."""
    if isinstance(value, bool):
        return frozenset(("boolean",))
    if isinstance(value, int) or isinstance(value, float) and value.is_integer():
        return frozenset(("integer", "number"))
    if isinstance(value, float):
        return frozenset(("number",))
    if value is None:
        return frozenset(("null",))
    return _TEXT if isinstance(value, str) else frozenset(("object" if isinstance(value, Mapping) else "array",))


def value_of(written: str, schema: Any, root: Any, words: Mapping[str, Any]) -> Any:
    """Parse the text between two tags.

    If the schema allows only text, the value is the text. If it allows text and other types, the value is JSON if the
    text has no blanks at its ends and parses to one of the other types, or else the text. If it allows no text, the
    value is JSON.

    Args:
        root: schema in which references are looked up.
        words: literals of the format that are not JSON, with their values.

    Raises:
        ValueError: the schema allows no text, and this is no JSON.
    """
    kinds = kinds_of(schema, root)
    if kinds == _TEXT:
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


def _pointed(root: Any, pointer: str) -> Mapping[str, Any] | None:
    target = root
    for part in pointer.removeprefix("#").strip("/").split("/"):
        name = part.replace("~1", "/").replace("~0", "~")
        if name:
            target = target.get(name) if isinstance(target, Mapping) else None
    return target if isinstance(target, Mapping) else None
