"""Grammars of the values of arguments: JSON in which no text writes a tag, and texts between tags."""

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
"""Texts that a parser may read as JSON, or as Python's words for it."""

_SCALARS = {"null": "/null/", "boolean": "/true|false/", "integer": "/-?(0|[1-9][0-9]*)/"}
_SCALARS["number"] = r"/-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?/"
_TYPES = ["null", "boolean", "number", "string", "array", "object"]
_NOTES = {"title", "description", "default", "examples", "type", "deprecated"}
_LIMITS = {"enum", "const", "pattern", "minLength", "maxLength"}


def json_schema(format: CallFormat, schema: Any, root: Mapping[str, Any]) -> str:
    """Return a schema for `%json`, written as the format writes JSON: no text in it writes a tag that ends a value.

    Args:
        format: of the calls.
        schema: of the value.
        root: the schema whose definitions it may name.

    Raises:
        BadInput: it has keys that cannot be kept from writing a tag.
    """
    (items, keys), ends = format.separators, format.ends
    definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
    held = {**definitions, **(schema if isinstance(schema, Mapping) else {})}
    if ends:
        pattern = pattern_without(ends)
        held = _plain(held, pattern, ends)
        anything: dict[str, Any] = {"type": _TYPES, "pattern": pattern, "items": _reference()}
        anything |= {"patternProperties": {pattern: _reference()}, "additionalProperties": False}
        held["$defs"] = {**held.get("$defs", {}), _ANYTHING: anything}
    if format.sorts:
        held = _sorted(held)
    return json.dumps(
        {**held, "x-guidance": {"whitespace_flexible": False, "item_separator": items, "key_separator": keys}}
    )


def pattern_without(ends: Sequence[str]) -> str:
    """Return a regular expression, without look-ahead, of texts in which no tag begins as one of `ends` does: `<` or
    `</`, and a letter."""
    opening = "".join(sorted({re.escape(end[1]) for end in ends if end[1] != "/"}))
    closing = "".join(sorted({re.escape(end[2]) for end in ends if end[1] == "/"}))
    inside = rf"[^<]|<+(\/<+)*([^<\/{opening}]|\/[^<{closing}])"
    return rf"^({inside})*(<+(\/<+)*\/?)?$"


def reads_as(schema: Any, root: Mapping[str, Any], flagged: bool) -> str:
    """Return how a parser reads a value between tags: `text`, `json`, or `either`, JSON where it is JSON of a type that
    the schema allows (`calls/kinds.py`).

    Args:
        schema: of the value.
        root: the schema whose definitions it may name.
        flagged: whether the tags say which it is.
    """
    kinds = kinds_of(schema, root)
    if kinds == {"string"}:
        return "text"
    return "either" if not flagged and "string" in kinds else "json"


def texts_of(schema: Any, root: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the schemas of the texts that a schema allows."""
    return [branch for branch in _branches(schema, root) if branch.get("type") == "string"]


def text_terminal(schema: Mapping[str, Any], ends: Sequence[str]) -> str:
    """Return a terminal, in Lark's notation, of the texts of a schema of strings, which writes none of `ends`.

    Args:
        schema: of the texts.
        ends: tags that none writes.

    Raises:
        BadInput: none is left.
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
        parts.append(_slashed(f"{'' if begun else '(?s:.*)'}({inner}){'' if ended else '(?s:.*)'}"))
    return " & ".join(parts) + without(ends)


def without(ends: Sequence[str]) -> str:
    """Return what follows a terminal, in Lark's notation, of whose texts none writes one of `ends`."""
    return " & ~" + _slashed(f"(?s:.*)({'|'.join(map(re.escape, ends))})(?s:.*)") if ends else ""


def is_limited(schema: Mapping[str, Any]) -> bool:
    """Return whether a schema of strings allows some texts only."""
    return bool(_LIMITS & schema.keys())


def may_be_empty(schema: Mapping[str, Any]) -> bool:
    """Return whether a schema of strings allows the empty text."""
    if "enum" in schema or "const" in schema:
        return "" in schema.get("enum", [schema.get("const")])
    with boundary(BadInput, "tool call", "a pattern that is a regular expression", "correct it"):
        return not schema.get("minLength") and re.search(schema.get("pattern", ""), "") is not None


def either_terminal(schema: Any, root: Mapping[str, Any], ends: Sequence[str]) -> str:
    """Return a terminal of the texts and of the single words of JSON that a schema of both allows. No text looks like
    JSON, but for quotes around it, which are its own."""
    no_json = ["~" + _slashed(_LITERAL), r"~/[{\[](?s:.)*/"]
    parts = [" & ".join((f"({text_terminal(branch, ends)})", *no_json)) for branch in texts_of(schema, root)]
    for branch in _branches(schema, root):
        if branch.get("type") in list(_SCALARS) and "enum" in branch:
            parts += [json.dumps(json.dumps(value)) for value in branch["enum"]]
        elif branch.get("type") in list(_SCALARS) and branch.keys() <= _NOTES:
            parts.append(_SCALARS[branch["type"]])
    return " | ".join(f"({part})" for part in parts)


def python_words(schema: Any, root: Mapping[str, Any]) -> list[str]:
    """Return Python's words for the truth values and null that a schema allows."""
    words: list[Any] = []
    for branch in _branches(schema, root):
        if branch.get("type") in ("boolean", "null"):
            words += branch.get("enum", [None] if branch["type"] == "null" else [True, False])
    return list(dict.fromkeys(map(repr, words)))


def either_json(schema: Any, root: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the schema of the objects and lists that a schema of these and of texts allows; None where there are
    none."""
    branches = [branch for branch in _branches(schema, root) if branch.get("type") in ("object", "array")]
    return {"anyOf": branches} if branches else None


def _branches(schema: Any, root: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the schemas of one type each whose values together are those of a schema."""
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


def _slashed(expression: str) -> str:
    """Return a regular expression between slashes."""
    return "/" + re.sub(r"(?<!\\)/", r"\\/", expression) + "/"


def _sorted(schema: Any) -> Any:
    """Return a schema whose properties are in the order of their names."""
    if isinstance(schema, list):
        return [_sorted(part) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    named = {name: _sorted(value) for name, value in sorted(schema.get("properties", {}).items())}
    return {key: named if key == "properties" else _sorted(value) for key, value in schema.items()}


def _reference() -> dict[str, str]:
    return {"$ref": f"#/$defs/{_ANYTHING}"}


def _plain(schema: Any, pattern: str, ends: Sequence[str]) -> Any:
    """Return a schema of those values of another in which texts and keys match a pattern, objects without keys that
    are not named."""
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
    return _typed(out, inner, pattern, ends)


def _typed(out: dict[str, Any], inner: Any, pattern: str, ends: Sequence[str]) -> dict[str, Any]:
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
