"""JSON schemas with resolved references, `allOf` and alternatives, for parsing values, writing grammars of values, and
making sample values."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any

from referencing import Registry
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012

from sparring.errors import BadInput, boundary, refusal

KINDS = frozenset(("null", "boolean", "integer", "number", "string", "array", "object"))
_BY_NAME = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions", "defs")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SINGLE = (
    *("items", "additionalItems", "unevaluatedItems", "contains", "additionalProperties", "unevaluatedProperties"),
    *("propertyNames", "not", "if", "then", "else", "contentSchema"),
)
"""Keywords whose values are schemas by name, lists of schemas, and single schemas, in this order."""

_DROPPED = frozenset(
    "$schema $id id $anchor $dynamicAnchor $recursiveAnchor $vocabulary $comment $defs definitions".split()
)
_COMBINING = frozenset(("$ref", "allOf", "anyOf", "oneOf"))
_LEAST = ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties", "minContains")
_MOST = ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties", "maxContains")
NOTES = frozenset("title description default example examples deprecated readOnly writeOnly format nullable".split())
"""Keywords that limit no value, or whose limits may be ignored when text is parsed."""

_APART = frozenset((*_SINGLE, *"oneOf prefixItems dependentSchemas dependentRequired dependencies".split()))
_APART |= {"pattern", "multipleOf", "uniqueItems"}
"""Keywords whose different values are not merged: the merged schema keeps them apart in `allOf`."""

FORMATS = frozenset("date time date-time duration email hostname ipv4 ipv6 uri uuid unknown".split())
"""Formats that `llguidance` knows. The library refuses other formats, although JSON Schema allows them."""

MOST_BRANCHES = 256
"""Maximum number of alternatives of a schema."""


def each_inner(schema: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """Return a schema with every schema directly inside it changed by a function."""
    out = dict(schema)
    for key, value in schema.items():
        if key in _BY_NAME and isinstance(value, Mapping):
            out[key] = {name: change(inner) for name, inner in value.items()}
        elif key in (*_LISTS, *_SINGLE) and isinstance(value, list):
            out[key] = [change(inner) for inner in value]
        elif key in _SINGLE:
            out[key] = change(value)
    return out


class Schema:
    """JSON schema with all its references inside `definitions`, made by `schema_of`.

    Attributes:
        top: schema itself, without definitions.
        definitions: schemas by name, which is the end of a `$ref`.
    """

    def __init__(self, root: Any) -> None:
        self.definitions: dict[str, Any] = {}
        self._names: dict[int, str] = {}
        resource = DRAFT202012.create_resource(root)
        base = resource.id() or ""
        self.top = self._closed(root, Registry().with_resource(base, resource).resolver(base))
        self._of_definition: dict[str, list[dict[str, Any]] | None] = {}

    def alone(self, schema: Any) -> Any:
        """Return a part of this schema together with the definitions that its references need."""
        if not isinstance(schema, Mapping) or not self.definitions:
            return schema
        return {**schema, "$defs": {**self.definitions, **schema.get("$defs", {})}}

    def branches(self, schema: Any) -> list[dict[str, Any]]:
        """Return the alternatives of a schema, which together allow the same values: schemas without `$ref`, `anyOf`
        and `oneOf`. Schemas that have to hold together are merged; what cannot be merged stays, as `allOf`. A `oneOf`
        whose alternatives may overlap stays too.

        Raises:
            BadInput: there are more than `MOST_BRANCHES` alternatives.
        """
        if not isinstance(schema, Mapping):
            return [] if schema is False else [{}]
        own = {key: value for key, value in schema.items() if key not in _COMBINING}
        if "const" in own:
            own |= {"enum": [own.pop("const")]}
        merged = [own]
        if "$ref" in schema:
            merged = _products(merged, self._definition(str(schema["$ref"]).rpartition("/")[2]))
        for part in schema.get("allOf") or ():
            merged = _products(merged, self.branches(part))
        for key in ("anyOf", "oneOf"):
            if isinstance(schema.get(key), list):
                parts = [self.branches(part) for part in schema[key]]
                merged = _products(merged, [branch for part in parts for branch in part])
                pairs = itertools.combinations(parts if key == "oneOf" else (), 2)
                if not all(self._exclude(a, b) for some, others in pairs for a in some for b in others):
                    merged = [{**branch, "oneOf": schema[key]} for branch in merged]
        return [branch for branch in merged if _is_possible(branch)]

    def kinds(self, schema: Any) -> frozenset[str]:
        """Return the JSON types that a schema allows: `number` includes `integer`; all types if the schema names none,
        contradicts itself, or has too many alternatives."""
        return frozenset[str]().union(*map(kinds_of_branch, self._told(schema))) or KINDS

    def member(self, schema: Any, name: str) -> Any:
        """Return the schema of the values under a name in the objects of a schema."""
        found = [_member(branch, name) for branch in self._told(schema) if "object" in kinds_of_branch(branch)]
        return found[0] if len(found) == 1 else {"anyOf": found} if found else True

    def _told(self, schema: Any) -> list[dict[str, Any]]:
        """Return the alternatives of a schema; if there are too many, return one that allows every value."""
        try:
            return self.branches(schema)
        except (BadInput, RecursionError):
            return [{}]

    def _exclude(self, one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
        """Return whether it is certain that no value fits two schemas without alternatives."""
        kinds = kinds_of_branch(one) & kinds_of_branch(other)
        if not kinds or "enum" in one and "enum" in other and not _common(one["enum"], other["enum"]):
            return True
        if kinds != {"object"}:
            return False
        for name in {*one.get("required", ())} & {*other.get("required", ())}:
            mine, others = (_listed(self.branches(_member(branch, name))) for branch in (one, other))
            if mine is not None and others is not None and not _common(mine, others):
                return True
        return _lacks(one, other) or _lacks(other, one)

    def _definition(self, name: str) -> list[dict[str, Any]]:
        if name not in self._of_definition:
            self._of_definition[name] = []  # a reference that leads back to itself allows nothing more
            self._of_definition[name] = self.branches(self.definitions[name])
        return self._of_definition[name] or []

    def _closed(self, schema: Any, resolver: Any) -> Any:
        if not isinstance(schema, Mapping):
            return schema
        if isinstance(schema.get("$id"), str):
            resolver = resolver.in_subresource(DRAFT202012.create_resource(schema))
        kept = {key: value for key, value in schema.items() if key not in _DROPPED}
        if isinstance(kept.get("items"), list):  # of older drafts
            kept |= {"prefixItems": kept.pop("items"), "items": kept.pop("additionalItems", True)}
        closed = each_inner(kept, lambda inner: self._closed(inner, resolver))
        for key in ("$ref", "$dynamicRef", "$recursiveRef"):
            if isinstance(closed.pop(key, None), str):
                closed["$ref"] = f"#/$defs/{self._named(schema[key], resolver)}"
        return closed

    def _named(self, pointer: str, resolver: Any) -> str:
        try:
            found = resolver.lookup(pointer)
        except Unresolvable:
            do = "write what it names into the schema (`$defs`)"
            raise refusal("JSON schema", "references into the schema itself", repr(pointer), do) from None
        name = self._names.get(id(found.contents))
        if name is None:
            name = self._names[id(found.contents)] = f"{len(self._names)}"
            self.definitions[name] = True
            self.definitions[name] = self._closed(found.contents, found.resolver)
        return name


def schema_of(schema: Any) -> Schema:
    """Resolve a JSON schema. The result is cached; nobody may change it.

    Raises:
        BadInput: a reference leads out of the schema, or to nothing.
    """
    return _resolved(json.dumps(schema, default=dict))


@lru_cache(256)
def _resolved(source: str) -> Schema:
    with boundary(BadInput, "JSON schema", "a schema that can be read", "correct it"):
        return Schema(json.loads(source))


@cache
def _byte_tokens() -> Any:
    import llguidance

    return llguidance, llguidance.LLTokenizer("byte")


def text_matcher(schema: Mapping[str, Any]) -> Any:
    """Return a `llguidance` matcher, over bytes, of a schema's values as JSON text."""
    llguidance, tokens = _byte_tokens()
    grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema))
    return llguidance.LLMatcher(tokens, grammar, log_level=0)


def fits_pattern(pattern: str, text: str) -> bool:
    """Return whether a pattern of JSON Schema is found in a text, in time that is linear in the text; False for a
    pattern that cannot be read."""
    matcher = text_matcher({"type": "string", "pattern": pattern})
    written = json.dumps(text, ensure_ascii=False).encode("utf-8", "replace")
    return not matcher.is_error() and bool(matcher.consume_tokens(list(written)) and matcher.is_accepting())


def kinds_of_value(value: Any) -> frozenset[str]:
    """Return the JSON types of a value."""
    if value is None or isinstance(value, bool):
        return frozenset(("null" if value is None else "boolean",))
    if isinstance(value, (int, float)):
        return frozenset(("integer", "number") if isinstance(value, int) or value.is_integer() else ("number",))
    return frozenset(("string" if isinstance(value, str) else "object" if isinstance(value, Mapping) else "array",))


def kinds_of_branch(branch: Mapping[str, Any]) -> frozenset[str]:
    """Return the JSON types that a schema without alternatives allows."""
    kinds, named = KINDS, branch.get("type")
    if isinstance(named, str) or isinstance(named, list) and named:
        types = {named} if isinstance(named, str) else set(map(str, named))
        kinds &= types | ({"integer"} if "number" in types else set())
    if "enum" in branch:
        kinds &= frozenset[str]().union(*map(kinds_of_value, branch["enum"]))
    return kinds


def _member(branch: Mapping[str, Any], name: str) -> Any:
    properties, patterns = branch.get("properties") or {}, branch.get("patternProperties") or {}
    parts = [properties[name]] if name in properties else []
    parts += [inner for pattern, inner in patterns.items() if fits_pattern(pattern, name)]
    return _all_of(*parts) if parts else branch.get("additionalProperties", True)


def _products(some: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    if len(some) * len(others) > MOST_BRANCHES:
        raise refusal("JSON schema", f"at most {MOST_BRANCHES} alternatives", "more", "write fewer")
    return [_merged(one, other) for one in some for other in others]


def _merged(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    if not one or not other:
        return one or other
    merged, apart = dict(one), [*one.get("allOf", ()), *other.get("allOf", ())]
    for key, value in other.items():
        if key not in merged or key in NOTES or merged[key] == value:
            merged.setdefault(key, value)
        elif key == "type":
            kinds = kinds_of_branch({"type": merged[key]}) & kinds_of_branch({"type": value})
            merged[key] = sorted(kinds - {"integer"} if "number" in kinds else kinds) or ["contradiction"]
        elif key == "enum":
            merged[key] = _common(merged[key], value)
        elif key == "required":
            merged[key] = list(dict.fromkeys((*merged[key], *value)))
        elif key in _LEAST or key in _MOST:
            merged[key] = (max if key in _LEAST else min)(merged[key], value)
        elif key in ("items", "additionalProperties"):
            merged[key] = _all_of(merged[key], value)
        elif key == "patternProperties":
            patterns = dict.fromkeys((*merged[key], *value))
            merged[key] = {each: _all_of(merged[key].get(each, True), value.get(each, True)) for each in patterns}
        elif key in _APART:
            apart.append({key: value})
    if names := dict.fromkeys((*(one.get("properties") or ()), *(other.get("properties") or ()))):
        merged["properties"] = {name: _all_of(_member(one, name), _member(other, name)) for name in names}
    return {**merged, "allOf": apart} if apart else merged


def _common(some: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    return [value for value in some if any(same_json(value, other) for other in others)]


def _listed(branches: Sequence[Mapping[str, Any]]) -> list[Any] | None:
    """Return the `enum` values of all alternatives; None if there is no alternative, or one has no `enum`."""
    listed = [branch.get("enum") for branch in branches]
    return [value for values in listed for value in values or ()] if listed and None not in listed else None


def _lacks(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether one schema forbids a key that the other requires."""
    return any(_member(one, name) is False for name in other.get("required", ()))


def _all_of(*schemas: Any) -> Any:
    """Return a schema of the values that fit all the given schemas."""
    told = [each for at, each in enumerate(schemas) if each is not True and each not in schemas[:at]]
    return {"allOf": told} if len(told) > 1 else told[0] if told else True


def _is_possible(branch: Mapping[str, Any]) -> bool:
    needed = (_member(branch, name) for name in branch.get("required", ()))
    return bool(kinds_of_branch(branch)) and not any(inner is False for inner in needed)


def same_json(one: Any, other: Any) -> bool:
    """Compare two values as JSON does, where true is not 1."""
    return one == other and json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)
