"""Arguments made from the schema of a tool, to try how a format writes and parses them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from sparring.render.calls.kinds import KINDS, kinds_of, resolved

_TEXTS = (
    'print("a\\n", \'b\')\nif 1 < 2 and 3 > 2:\n    print("数 é 🙂 \\\\ {x} </p>")',
    "    return x\n",
    "",
    "\n<b>a & b</b>\t",
)
"""Texts with quotes, newlines, blanks at the ends, accents and markup. None is valid JSON, because under a schema that
allows text and other types, valid JSON is not parsed as text."""

_SCALARS: Mapping[str, tuple[Any, ...]] = {
    "string": _TEXTS,
    "number": (-1.5, 2e-7, 3),
    "integer": (0, -12, 2**53 + 1),
    "boolean": (True, False),
    "null": (None,),
}
_OBJECT = {"list": [1, None, True], "empty": "", "é": {"a": "x y"}}
_ORDER = ("string", "number", "integer", "boolean", "null", "array", "object")
_MOST = 8
"""Maximum number of sets of arguments for one tool, not counting the set of required properties alone."""

_DEEPEST = 4


def sample_arguments(parameters: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield distinct sets of arguments of a tool: all properties, with values of each type that the schema allows, and
    the required properties alone. Limits such as `maxLength` are ignored, since no parser depends on them."""
    properties = parameters.get("properties")
    if not isinstance(properties, Mapping):
        properties = {}
    variants: list[dict[str, Any]] = []
    most = max((_branches(schema, parameters) for schema in properties.values()), default=1)
    for variant in range(min(_MOST, max(2, most))):
        variants.append({key: _value(schema, parameters, variant, 0) for key, schema in properties.items()})
    required = parameters.get("required") or ()
    variants.append({key: value for key, value in variants[0].items() if key in required})
    for at, arguments in enumerate(variants):
        if not any(_same(arguments, other) for other in variants[:at]):
            yield arguments


def _branches(schema: Any, root: Mapping[str, Any]) -> int:
    """Count the values that are needed to show every type and enum value of a schema."""
    schema = resolved(schema, root)
    listed = len(schema.get("enum") or ()) if isinstance(schema, Mapping) else 0
    kinds = kinds_of(schema, root)
    return max(listed, len(kinds) + (len(_TEXTS) - 1 if "string" in kinds else 0))


def _value(schema: Any, root: Mapping[str, Any], variant: int, depth: int) -> Any:
    """Return the value of a schema with the given variant number."""
    schema = resolved(schema, root)
    if not isinstance(schema, Mapping):
        schema = {}
    listed = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(listed, list) and listed:
        return listed[variant % len(listed)]
    for key in ("anyOf", "oneOf"):
        branches = schema.get(key)
        if isinstance(branches, list) and branches and depth < _DEEPEST:
            return _value(branches[variant % len(branches)], root, variant // len(branches), depth + 1)
    kinds = kinds_of(schema, root)
    values = [(kind, value) for kind in _ORDER if kind in kinds for value in _SCALARS.get(kind, (None,))]
    kind, value = values[variant % len(values)]
    if kinds == KINDS and variant < len(_ORDER):  # a schema without a type: one value of each
        kind = _ORDER[variant]
        value = _SCALARS.get(kind, (None,))[0]
    if kind == "array":
        items = schema.get("items", True)
        return [] if depth >= _DEEPEST else [_value(items, root, variant + at, depth + 1) for at in range(2)]
    return _object(schema, root, variant, depth) if kind == "object" else value


def _object(schema: Mapping[str, Any], root: Mapping[str, Any], variant: int, depth: int) -> dict[str, Any]:
    properties = schema.get("properties")
    if depth >= _DEEPEST:
        return {}
    if not isinstance(properties, Mapping) or not properties:
        return dict(_OBJECT)
    return {key: _value(inner, root, variant, depth + 1) for key, inner in properties.items()}


def _same(value: Any, other: Any) -> bool:
    """Compare two values as JSON does, where True is not 1."""
    return value == other and repr(value) == repr(other)
