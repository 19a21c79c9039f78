"""Grammars of the values of arguments: JSON whose texts contain no tag, and texts between tags."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from sparring.errors import refusal
from sparring.render.calls.schemas import (
    FORMATS,
    NOTES,
    Schema,
    each_inner,
    fits_pattern,
    kinds_of_branch,
    kinds_of_value,
    text_matcher,
)
from sparring.render.grammars.call_format import CallFormat

_ANYTHING = "sparring_anything"
_LITERAL = r"null|true|false|None|True|False|-?[0-9]+(\.[0-9]+)?([eE][-+]?[0-9]+)?"
"""Texts that a parser may read as JSON, or as Python's True, False and None."""

NUMBER = r"/-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?([eE][-+]?[0-9]{1,2})?/"
"""Terminal of JSON numbers within the range of a double."""

_SCALARS = {"null": "/null/", "boolean": "/true|false/", "integer": "/-?(0|[1-9][0-9]*)/"}
_SCALARS["number"] = NUMBER
_TYPES = ["null", "boolean", "number", "string", "array", "object"]
BOUNDS = {"minimum": -(10**18), "maximum": 10**18}
"""Bounds of numbers whose schema has no bounds. With bounds, the library writes numbers without exponents, so that no
number exceeds a double."""

_ENDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
_UNKEPT = ("not", "if", "oneOf")
_LIMITS = {"enum", "const", "pattern", "minLength", "maxLength"}


def json_schema(format: CallFormat, schema: Any, root: Schema) -> str:
    """Return a schema for `%json`, with the format's separators and order of keys, in which no text contains a tag that
    ends a value.

    Raises:
        BadInput: the schema allows keys that may contain a tag.
    """
    (items, keys) = format.separators
    restricted = as_read(schema, root, format.ends)
    if format.sorts:
        restricted = _sorted(restricted)
    return json.dumps(
        {**restricted, "x-guidance": {"whitespace_flexible": False, "item_separator": items, "key_separator": keys}}
    )


def as_read(schema: Any, root: Schema, ends: Sequence[str] = ()) -> dict[str, Any]:
    """Return a schema for the library, of values that parse to what was written: numbers within a double, and texts and
    keys that contain none of `ends`. Formats that the library does not know are left out.

    Raises:
        BadInput: the schema allows keys that may contain one of `ends`.
    """
    made = {name: _plain(inner, root, ends) for name, inner in root.definitions.items()}
    anything = _with_limits({"type": _TYPES}, ends)
    return {**_plain(schema, root, ends), "$defs": {**made, _ANYTHING: anything}}


def pattern_without(ends: Sequence[str]) -> str:
    """Return a regular expression, without look-ahead, of texts that contain no tag like `ends`: no `<` or `</`
    followed by the first letter of such a tag's name."""
    opening = "".join(sorted({re.escape(end[1]) for end in ends if end[1] != "/"}))
    closing = "".join(sorted({re.escape(end[2]) for end in ends if end[1] == "/"}))
    inside = rf"[^<]|<+(\/<+)*([^<\/{opening}]|\/[^<{closing}])"
    return rf"^({inside})*(<+(\/<+)*\/?)?$"


def reads_as(schema: Any, root: Schema, flagged: bool) -> str:
    """Return the way in which a parser reads a value between tags: `text`, `json`, or `either`: JSON if the value
    parses to a type that the schema allows, or else text (`calls/kinds.py`).

    Args:
        flagged: whether the tags tell texts from JSON.
    """
    kinds = root.kinds(schema)
    if kinds == {"string"}:
        return "text"
    return "either" if not flagged and "string" in kinds else "json"


def texts_of(schema: Any, root: Schema) -> list[Mapping[str, Any]]:
    """Return the branches of a schema that allow text."""
    return [branch for branch in _branches(schema, root) if branch.get("type") == "string"]


def text_terminal(schema: Mapping[str, Any], ends: Sequence[str]) -> str:
    """Return a terminal, in Lark's notation, of the texts of a schema that contain none of `ends`.

    Args:
        ends: tags that no text may contain.

    Raises:
        BadInput: no text is left, or the schema limits texts in a way that a terminal cannot express.
    """
    for key in _UNKEPT:
        if key in schema:
            expected = "a schema whose limits can be kept between tags"
            raise refusal("tool call", expected, key, "leave it out, or leave the tool choice to the policy")
    if "enum" in schema:
        listed = schema["enum"]
        values = [value for value in listed if isinstance(value, str) and not any(end in value for end in ends)]
        if not values:
            expected = "a value that the format can write between tags"
            raise refusal("tool call", expected, repr(listed), "change the enum")
        return " | ".join(json.dumps(value, ensure_ascii=False) for value in values)
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    parts = [f"/(?s:.){{{least},{most}}}/"] if is_limited(schema) else ["/(?s:.)*/"]
    for pattern in _patterns(schema):
        begun, ended = pattern.startswith("^"), pattern.endswith("$") and not pattern.endswith("\\$")
        inner = pattern[begun : len(pattern) - ended]
        parts.append(_in_slashes(f"{'' if begun else '(?s:.*)'}({inner}){'' if ended else '(?s:.*)'}"))
    return " & ".join(parts) + without(ends)


def without(ends: Sequence[str]) -> str:
    """Return a suffix of a terminal, in Lark's notation, that excludes texts that contain one of `ends`."""
    return " & ~" + _in_slashes(f"(?s:.*)({'|'.join(map(re.escape, ends))})(?s:.*)") if ends else ""


def is_limited(schema: Mapping[str, Any]) -> bool:
    """Return whether a schema of strings excludes some texts."""
    return bool(_LIMITS & schema.keys())


def may_be_empty(schema: Mapping[str, Any]) -> bool:
    """Return whether a schema of strings allows the empty text."""
    if "enum" in schema:
        return "" in schema["enum"]
    return not schema.get("minLength") and all(fits_pattern(pattern, "") for pattern in _patterns(schema))


def either_terminal(schema: Any, root: Schema, ends: Sequence[str]) -> str:
    """Return a terminal for a schema that allows text and other types: its texts, and its literals in JSON. Texts that
    look like numbers, words, objects or arrays of JSON are excluded; a text in quotes is allowed, and includes its
    quotes."""
    no_json = ["~" + _in_slashes(_LITERAL), r"~/[{\[](?s:.)*/"]
    parts = [" & ".join((f"({text_terminal(branch, ends)})", *no_json)) for branch in texts_of(schema, root)]
    for branch in _branches(schema, root):
        if branch.get("type") in list(_SCALARS) and "enum" in branch:
            parts += [json.dumps(json.dumps(value)) for value in branch["enum"]]
        elif branch.get("type") in list(_SCALARS) and branch.keys() <= NOTES | {"type"}:
            parts.append(_SCALARS[branch["type"]])
    return " | ".join(f"({part})" for part in parts)


def python_words(schema: Any, root: Schema) -> list[str]:
    """Return the words among Python's True, False and None whose values a schema allows."""
    words: list[Any] = []
    for branch in _branches(schema, root):
        if branch.get("type") in ("boolean", "null"):
            words += branch.get("enum", [None] if branch["type"] == "null" else [True, False])
    return list(dict.fromkeys(map(repr, words)))


def either_json(schema: Any, root: Schema) -> dict[str, Any] | None:
    """Return the schema of the objects and arrays that a schema allows besides text; None if only text is allowed."""
    branches = [branch for branch in _branches(schema, root) if branch.get("type") in ("object", "array")]
    return {"anyOf": branches} if branches else None


def _branches(schema: Any, root: Schema) -> list[Mapping[str, Any]]:
    """Split a schema into schemas of a single type each."""
    split = list[Mapping[str, Any]]()
    for branch in root.branches(schema):
        kinds = kinds_of_branch(branch)
        kinds -= {"integer"} if "number" in kinds else set()
        for type in (type for type in (*_TYPES, "integer") if type in kinds):
            listed = [value for value in branch.get("enum", ()) if type in kinds_of_value(value)]
            split.append({**branch, "type": type, **({"enum": listed} if "enum" in branch else {})})
    return split


def _patterns(schema: Mapping[str, Any]) -> list[str]:
    return [part["pattern"] for part in (schema, *schema.get("allOf", ())) if "pattern" in part]


def _in_slashes(expression: str) -> str:
    return "/" + re.sub(r"(?<!\\)/", r"\\/", expression) + "/"


def _sorted(schema: Any) -> Any:
    """Return a schema with its properties in alphabetical order."""
    if not isinstance(schema, Mapping):
        return schema
    out = each_inner(schema, _sorted)
    return {**out, "properties": dict(sorted(out["properties"].items()))} if "properties" in out else out


def _reference() -> dict[str, str]:
    return {"$ref": f"#/$defs/{_ANYTHING}"}


def _plain(schema: Any, root: Schema, ends: Sequence[str]) -> Any:
    """Restrict a schema as `as_read` does. With `ends`, an object that names properties allows no additional ones."""
    if not isinstance(schema, Mapping):
        return _reference() if schema is True else {"not": {}} if schema is False else {}
    kept = {key: value for key, value in schema.items() if key != "format" or value in FORMATS}
    joined = kept.keys() & {"$ref", "anyOf", "oneOf", "allOf"}
    beside = kept.keys() - joined - NOTES
    if "allOf" in joined and len(kept["allOf"]) == 1 and len(joined) == 1 and not beside:
        return _plain(kept["allOf"][0], root, ends)
    if "allOf" in joined or len(joined) > 1 or joined and beside:  # the library intersects few schemas
        branches = root.branches(kept)
        if branches and not any(branch.keys() & {"allOf", "oneOf"} for branch in branches):
            made = [_plain(branch, root, ends) for branch in branches]
            return made[0] if len(made) == 1 else {"anyOf": made}
    out = each_inner(kept, lambda inner: inner if inner is False else _plain(inner, root, ends))
    if "enum" in out or "const" in out:
        listed = [v for v in out.pop("enum", [out.pop("const", None)]) if not _writes(v, ends)]
        if not listed:
            raise refusal("tool call", "a value that writes no tag", "none", "change the enum")
        return {**out, "enum": listed}
    if joined:
        return out
    if out.keys() <= NOTES:
        return {**out, **_reference()}
    return _with_limits(out, ends)


def _with_limits(out: dict[str, Any], ends: Sequence[str]) -> dict[str, Any]:
    if ends:
        out.setdefault("type", next((t for key, t in _KEYS.items() if key in out), _TYPES))
    types = out.get("type", _TYPES)
    if "number" in types and not _ENDS & out.keys():
        out |= BOUNDS
    if "array" in types:
        out.setdefault("items", _reference())
    if "object" in types and not ends:
        out.setdefault("additionalProperties", _reference())
    if not ends:
        return out
    pattern = pattern_without(ends)
    if "string" in types:
        if "pattern" in out:
            out["allOf"] = [{"type": "string", "pattern": out.pop("pattern")}]
        out["pattern"] = pattern
    if "object" in types:
        if _writes(list(out.get("properties", ())), ends):
            raise refusal("tool call", "keys that write no tag", repr(list(out["properties"])), "rename them")
        others = out.get("additionalProperties", _reference())
        if "patternProperties" in out:
            out["patternProperties"] = {_without_tags(key, ends): v for key, v in out["patternProperties"].items()}
        elif not out.get("properties") and others is not False:
            out["patternProperties"] = {pattern: others}
        out["additionalProperties"] = False
    return out


def _without_tags(pattern: str, ends: Sequence[str]) -> str:
    """Restrict a pattern of keys: text before and after the match contains no `<`, so no tag.

    Raises:
        BadInput: the pattern still allows keys that contain one of `ends`.
    """
    begun, ended = pattern.startswith("^"), pattern.endswith("$") and not pattern.endswith("\\$")
    inner = f"{'' if begun else '^[^<]*'}(?:{pattern}){'' if ended else '[^<]*$'}"
    both = {"type": "string", "allOf": [{"pattern": inner}, {"pattern": "|".join(map(re.escape, ends))}]}
    if not text_matcher(both).is_error():
        raise refusal("tool call", "keys that write no tag", f"patternProperties {pattern!r}", "leave out `<` there")
    return inner


_KEYS = {"properties": "object", "required": "object", "additionalProperties": "object", "items": "array"}
_KEYS |= dict.fromkeys(("pattern", "minLength", "maxLength", "format"), "string")


def _writes(value: Any, ends: Sequence[str]) -> bool:
    text = json.dumps(value, ensure_ascii=False)
    return any(end in text for end in ends)
