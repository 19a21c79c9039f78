"""Types of JSON that the schema of an argument allows, and the reading of a value that stands between tags by them.

Between tags, a text is written as it is and everything else as JSON, so only the schema tells them apart.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

KINDS = frozenset(("null", "boolean", "integer", "number", "string", "array", "object"))
_TEXT = frozenset(("string",))
_DEEPEST = 16
"""References that are followed; more lead in a circle."""

PYTHON_WORDS: Mapping[str, Any] = {"True": True, "False": False, "None": None}
"""Words of Python that some templates write in the place of JSON's."""


def resolved(schema: Any, root: Any) -> Any:
    """Return the schema that a local reference (`#/$defs/name`), or an `allOf` of one alone, stands for; any other as
    it is."""
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
    """Return the types of JSON that a schema allows, `integer` beside `number`; all of them where it says nothing.

    Args:
        schema: of a value.
        root: the schema that references look into.
        depth: of this schema in another.
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
    return kinds or KINDS  # a schema that allows nothing says nothing of how it is written


def kinds_of_value(value: Any) -> frozenset[str]:
    """Return the types of JSON that a value has."""
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
    """Return the value of what stands between tags.

    Where only texts are allowed, it is the text. Where other types are as well, it is JSON if it is a value of one of
    these, without blanks at its ends, and else the text. Where no text is allowed, it is JSON.

    Args:
        written: what stands there.
        schema: of the value.
        root: the schema that references look into.
        words: that the format writes in the place of JSON's, with what they stand for.

    Raises:
        ValueError: it is none of these.
    """
    kinds = kinds_of(schema, root)
    if kinds == _TEXT:
        return written
    textual = "string" in kinds
    if textual and written != written.strip():
        return written
    try:
        value = words[written.strip()] if written.strip() in words else json.loads(written)
    except (ValueError, RecursionError) as cause:
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
