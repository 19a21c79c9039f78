"""Grammars of the values of arguments: JSON whose texts contain no tag, and texts between tags."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from sparring.errors import BadInput, boundary, refusal
from sparring.render.calls.kinds import kinds_of, kinds_of_value, resolved
from sparring.render.grammars.call_format import CallFormat

_ANYTHING = "sparring_anything"
_LITERAL = r"null|true|false|None|True|False|NaN|-?Infinity|-?[0-9]+(\.[0-9]+)?([eE][-+]?[0-9]+)?"
"""Texts that a parser may read as JSON, or as Python's True, False and None."""

_SCALARS = {"null": "/null/", "boolean": "/true|false/", "integer": "/-?(0|[1-9][0-9]*)/"}
_SCALARS["number"] = r"/-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?/"
_TYPES = ["null", "boolean", "number", "string", "array", "object"]
_NOTES = {"title", "description", "default", "examples", "type", "deprecated"}
_LIMITS = {"enum", "const", "pattern", "minLength", "maxLength"}


def json_schema(format: CallFormat, schema: Any, root: Mapping[str, Any]) -> str:
    """Return a schema for `%json`, with the format's separators and order of keys. Its texts contain no tag that ends a
    value.

    Args:
        root: schema whose definitions it may name.

    Raises:
        BadInput: the schema allows keys that may contain a tag.
    """
    (items, keys), ends = format.separators, format.ends
    definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
    restricted = {**definitions, **(schema if isinstance(schema, Mapping) else {})}
    if ends:
        pattern = pattern_without(ends)
        restricted = _plain(restricted, pattern, ends)
        anything: dict[str, Any] = {"type": _TYPES, "pattern": pattern, "items": _reference()}
        anything |= {"patternProperties": {pattern: _reference()}, "additionalProperties": False}
        restricted["$defs"] = {**restricted.get("$defs", {}), _ANYTHING: anything}
    if format.sorts:
        restricted = _sorted(restricted)
    return json.dumps(
        {**restricted, "x-guidance": {"whitespace_flexible": False, "item_separator": items, "key_separator": keys}}
    )


def pattern_without(ends: Sequence[str]) -> str:
    """Return a regular expression, without look-ahead, of texts that contain no tag like `ends`: no `<` or `</`
    followed by the first letter of one."""
    opening = "".join(sorted({re.escape(end[1]) for end in ends if end[1] != "/"}))
    closing = "".join(sorted({re.escape(end[2]) for end in ends if end[1] == "/"}))
    inside = rf"[^<]|<+(\/<+)*([^<\/{opening}]|\/[^<{closing}])"
    return rf"^({inside})*(<+(\/<+)*\/?)?$"


def reads_as(schema: Any, root: Mapping[str, Any], flagged: bool) -> str:
    """Return the way in which a parser reads a value between tags: `text`, `json`, or `either`: JSON if it parses to a
    type that the schema allows, or else text (`calls/kinds.py`).

    Args:
        root: schema whose definitions it may name.
        flagged: whether the tags tell texts from JSON.
    """
    kinds = kinds_of(schema, root)
    if kinds == {"string"}:
        return "text"
    return "either" if not flagged and "string" in kinds else "json"


def texts_of(schema: Any, root: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the branches of a schema that allow text."""
    return [branch for branch in _branches(schema, root) if branch.get("type") == "string"]


def text_terminal(schema: Mapping[str, Any], ends: Sequence[str]) -> str:
    """Return a terminal, in Lark's notation, of the texts of a schema that contain none of `ends`.

    Args:
        ends: tags that no text may contain.

    Raises:
        BadInput: no text is left.
    """
    if "enum" in schema or "const" in schema:
        listed = schema.get("enum", [schema.get("const")])
        values = [value for value in listed if isinstance(value, str) and not any(end in value for end in ends)]
        if not values:
            expected = "a value that the format can write between tags"
            raise refusal("tool call", expected, repr(listed), "change the enum")
        return " | ".join(json.dumps(value, ensure_ascii=False) for value in values)
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    parts = [f"/(?s:.){{{least},{most}}}/"] if is_limited(schema) else ["/(?s:.)*/"]
    if "pattern" in schema:
        pattern = schema["pattern"]
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
    if "enum" in schema or "const" in schema:
        return "" in schema.get("enum", [schema.get("const")])
    with boundary(BadInput, "tool call", "a pattern that is a regular expression", "correct it"):
        return not schema.get("minLength") and re.search(schema.get("pattern", ""), "") is not None


def either_terminal(schema: Any, root: Mapping[str, Any], ends: Sequence[str]) -> str:
    """Return a terminal for a schema that allows text and other types: its texts, and its literals in JSON. Texts that
    look like numbers, words, objects or arrays of JSON are excluded; a text in quotes is allowed, and includes its
    quotes."""
    no_json = ["~" + _in_slashes(_LITERAL), r"~/[{\[](?s:.)*/"]
    parts = [" & ".join((f"({text_terminal(branch, ends)})", *no_json)) for branch in texts_of(schema, root)]
    for branch in _branches(schema, root):
        if branch.get("type") in list(_SCALARS) and "enum" in branch:
            parts += [json.dumps(json.dumps(value)) for value in branch["enum"]]
        elif branch.get("type") in list(_SCALARS) and branch.keys() <= _NOTES:
            parts.append(_SCALARS[branch["type"]])
    return " | ".join(f"({part})" for part in parts)


def python_words(schema: Any, root: Mapping[str, Any]) -> list[str]:
    """Return Python's words for the booleans and null that a schema allows."""
    words: list[Any] = []
    for branch in _branches(schema, root):
        if branch.get("type") in ("boolean", "null"):
            words += branch.get("enum", [None] if branch["type"] == "null" else [True, False])
    return list(dict.fromkeys(map(repr, words)))


def either_json(schema: Any, root: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the schema of the objects and arrays that a schema allows besides text; None if it allows only text."""
    branches = [branch for branch in _branches(schema, root) if branch.get("type") in ("object", "array")]
    return {"anyOf": branches} if branches else None


def _branches(schema: Any, root: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Split a schema into schemas of a single type each."""
    schema = resolved(schema, root)
    if not isinstance(schema, Mapping):
        schema = {}
    if "enum" in schema or "const" in schema:
        listed = schema.get("enum", [schema.get("const")])
        rest = {key: value for key, value in schema.items() if key not in ("enum", "const")}
        return [
            {**rest, "type": type, "enum": values}
            for type in _TYPES
            if (values := [value for value in listed if type in kinds_of_value(value) & kinds_of(rest, root)])
        ]
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            return [branch for part in schema[key] for branch in _branches(part, root)]
    named = schema.get("type", _TYPES)
    return [schema] if isinstance(named, str) else [{**schema, "type": type} for type in named]


def _in_slashes(expression: str) -> str:
    return "/" + re.sub(r"(?<!\\)/", r"\\/", expression) + "/"


def _sorted(schema: Any) -> Any:
    """Return a schema with its properties in alphabetical order."""
    if isinstance(schema, list):
        return [_sorted(part) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    named = {name: _sorted(value) for name, value in sorted(schema.get("properties", {}).items())}
    return {key: named if key == "properties" else _sorted(value) for key, value in schema.items()}


def _reference() -> dict[str, str]:
    return {"$ref": f"#/$defs/{_ANYTHING}"}


def _plain(schema: Any, pattern: str, ends: Sequence[str]) -> Any:
    """Restrict a schema to values whose texts and keys match a pattern. Objects have no other than their named keys."""
    if not isinstance(schema, Mapping):
        return _reference() if schema is True else schema

    def inner(value: Any) -> Any:
        return _plain(value, pattern, ends)

    out = dict(schema)
    if "patternProperties" in out:
        raise refusal("tool call", "a schema of named keys", "patternProperties", "name the keys")
    for key in ("properties", "$defs", "definitions"):
        if key in out:
            out[key] = {name: inner(value) for name, value in out[key].items()}
    for key in ("anyOf", "oneOf", "allOf", "prefixItems"):
        if key in out:
            out[key] = [inner(value) for value in out[key]]
    if isinstance(out.get("items"), Mapping | bool):
        out["items"] = inner(out["items"])
    if "enum" in out or "const" in out:
        listed = [v for v in out.pop("enum", [out.pop("const", None)]) if not _writes(v, ends)]
        if not listed:
            raise refusal("tool call", "a value that writes no tag", "none", "change the enum")
        return {**out, "enum": listed}
    if out.keys() & {"$ref", "anyOf", "oneOf", "allOf"}:
        return out
    if out.keys() - {"$defs", "definitions"} <= _NOTES - {"type"}:
        return {**out, **_reference()}
    return _with_pattern(out, inner, pattern, ends)


def _with_pattern(out: dict[str, Any], inner: Any, pattern: str, ends: Sequence[str]) -> dict[str, Any]:
    types = out.setdefault("type", next((t for key, t in _KEYS.items() if key in out), _TYPES))
    if "string" in types:
        if "pattern" in out:
            out["allOf"] = [{"type": "string", "pattern": out.pop("pattern")}]
        out["pattern"] = pattern
    if "array" in types:
        out.setdefault("items", _reference())
    if "object" in types:
        if _writes(list(out.get("properties", ())), ends):
            raise refusal("tool call", "keys that write no tag", repr(list(out["properties"])), "rename them")
        others = out.get("additionalProperties", True)
        if not out.get("properties") and others is not False:
            out["patternProperties"] = {pattern: inner(others)}
        out["additionalProperties"] = False
    return out


_KEYS = {"properties": "object", "required": "object", "additionalProperties": "object", "items": "array"}
_KEYS |= dict.fromkeys(("pattern", "minLength", "maxLength", "format"), "string")


def _writes(value: Any, ends: Sequence[str]) -> bool:
    text = json.dumps(value, ensure_ascii=False)
    return any(end in text for end in ends)
