"""Grammars of values in a dialect of JSON with bare keys, and with texts between control tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sparring.errors import refusal
from sparring.render.calls.schemas import NOTES, Schema, kinds_of_value
from sparring.render.grammars.call_format import CONTROL, CallFormat, quoted
from sparring.render.grammars.value_grammar import BOUNDS, NUMBER, may_be_empty, text_terminal

_SCALARS = {
    "null": (),
    "boolean": (),
    "integer": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}
"""Types whose values are written as in JSON, with the keywords that limit them."""

_HINTS = {
    "object": ("properties", "required", "additionalProperties"),
    "array": ("items", "minItems", "maxItems"),
    "string": ("pattern", "minLength", "maxLength"),
    "number": _SCALARS["number"],
}
"""Keywords that imply a type if the schema names none."""

_LEFT_OUT = frozenset(
    "not if then else dependentRequired dependentSchemas dependencies patternProperties propertyNames minProperties"
    " maxProperties prefixItems additionalItems unevaluatedItems unevaluatedProperties uniqueItems contains minContains"
    " maxContains $dynamicRef $recursiveRef".split()
)
"""Keywords whose limits on a value these rules cannot enforce."""

_TYPES = ("null", "boolean", "number", "string", "array", "object")
_EDGE, _INSIDE = r"[^:,{}\[\]<\s\x1c-\x1f]", r"[^:,{}\[\]]"
_LAST = r"[^:,{}\[\]\s\x1c-\x1f]"
_KEY = rf"{_EDGE}({_INSIDE}*{_LAST})?"
"""Regular expression of keys that need no quotes: no punctuation of objects, no blanks at the ends."""


class QuotedValues:
    """Grammar rules of the values of one schema, in Lark's notation.

    Args:
        name: lower-case prefix of the rules' names.
        terms: function that writes a text of the format as terms of a grammar.
    """

    def __init__(self, format: CallFormat, root: Schema, name: str, terms: Callable[[str], str]) -> None:
        assert format.quote is not None
        self._format, self._root, self._name, self._terms = format, root, name, terms
        self._quote = format.quote
        self._named: dict[str, str] = {}
        self.rules: list[str] = []

    def rule(self, schema: Any) -> str:
        """Return the name of the rule of a schema's values, and add it and the rules that it uses to `rules`.

        Raises:
            BadInput: the schema allows no value that the format can write, or limits values in a way that these rules
                cannot enforce.
        """
        return self._put(self._values(schema))

    def _put(self, expression: str) -> str:
        name = f"{self._name}_{len(self.rules)}"
        self.rules.append(f"{name}: {expression}")
        return name

    def _values(self, schema: Any) -> str:
        if schema is True or schema == {}:
            return self._shared_rule("anything", self._anything)
        if not isinstance(schema, Mapping):
            raise refusal("tool call", "a schema that allows a value", repr(schema), "change it")
        left_out = sorted(_LEFT_OUT & {key for key, value in schema.items() if value not in (False, [], {})})
        if left_out:
            expected = "a schema whose limits can be kept outside JSON"
            raise refusal("tool call", expected, left_out[0], "leave it out, or leave the tool choice to the policy")
        if "enum" in schema or "const" in schema:
            return self._choice(schema)
        if schema.keys() & {"$ref", "allOf", "anyOf", "oneOf"}:
            return self._shared_rule(json.dumps(schema), lambda: self._alternatives(schema))
        named = schema.get("type", [type for type, hints in _HINTS.items() if schema.keys() & set(hints)] or _TYPES)
        types = [named] if isinstance(named, str) else list(named)
        return " | ".join(self._values_of_type(type, schema) for type in types)

    def _alternatives(self, schema: Mapping[str, Any]) -> str:
        branches = self._root.branches(schema)
        apart = next((key for branch in branches for key in ("allOf", "oneOf") if key in branch), None)
        if apart or not branches:
            expected = "alternatives that exclude each other, each with limits that become one"
            do = "write one schema, or leave the tool choice to the policy"
            raise refusal("tool call", expected, apart or "none that allows a value", do)
        return " | ".join(map(self.rule, branches))

    def _shared_rule(self, what: str, made: Callable[[], str]) -> str:
        """Return the name of a rule that is made at its first use, and may refer to itself."""
        if what not in self._named:
            name = self._named[what] = f"{self._name}_of_{len(self._named)}"
            self.rules.append(f"{name}: {made()}")
        return self._named[what]

    def _values_of_type(self, type: str, schema: Mapping[str, Any]) -> str:
        if type == "string":
            return self._text(schema)
        if type == "object":
            return self._object(schema)
        if type == "array":
            return self._array(schema)
        if type not in _SCALARS:
            raise refusal("tool call", f"a type of JSON ({', '.join(_TYPES)})", repr(type), "correct the schema")
        limits = {key: schema[key] for key in _SCALARS[type] if key in schema}
        if type == "number" and not limits:
            return self._put(NUMBER)
        if type == "number" and limits.keys() == {"multipleOf"}:
            limits |= BOUNDS
        return self._put(f"%json {json.dumps({'type': type, **limits})}")

    def _text(self, schema: Mapping[str, Any]) -> str:
        quote = self._terms(self._quote)
        if schema.get("maxLength") == 0:
            return self._put(f"{quote} {quote}")
        name = f"{self._name}_text_{len(self.rules)}".upper()
        terminal = text_terminal(schema, self._format.ends)
        self.rules.append(f"{name}: ({terminal}) & /(?s:.)+/")
        empty = "?" if may_be_empty({**schema, "type": "string"}) else ""
        return self._put(f"{quote} {name}{empty} {quote}")

    def _choice(self, schema: Mapping[str, Any]) -> str:
        """Return an expression of the values of an enum, without those that the format cannot write."""
        types = schema.get("type", [])
        types = [types] if isinstance(types, str) else types
        listed = schema.get("enum", [schema.get("const")])
        listed = [value for value in listed if not types or kinds_of_value(value) & {*types}]
        written = [value for value in listed if self._is_writable(value)]
        beside = sorted(schema.keys() - NOTES - {"enum", "const", "type"})
        if beside or not written:
            got = f"{listed!r}{f' beside {beside[0]}' if beside else ''}"
            raise refusal("tool call", "a list of values that the format can write, alone", got, "change the enum")
        return " | ".join(self._terms(quoted(value, self._quote)) for value in written)

    def _is_writable(self, value: Any) -> bool:
        if isinstance(value, str):
            return not any(end in value for end in self._format.ends) and all(ord(sign) < CONTROL for sign in value)
        if isinstance(value, Mapping):
            return all(re.fullmatch(_KEY, key) and self._is_writable(part) for key, part in value.items())
        return not isinstance(value, Sequence) or all(map(self._is_writable, value))

    def _array(self, schema: Mapping[str, Any]) -> str:
        items, least, most = schema.get("items", True), schema.get("minItems", 0), schema.get("maxItems")
        if items is False or most == 0:
            return self._put('"[]"')
        item = self.rule(items)
        more = "" if most == 1 else f'("," {item}){{{max(0, least - 1)},{"" if most is None else most - 1}}}'
        filled = self._put(f'"[" {item} {more} "]"')
        return filled if least else self._put(f'"[]" | {filled}')

    def _object(self, schema: Mapping[str, Any]) -> str:
        """Return an expression of an object with its named keys in alphabetical order, or with any keys if the schema
        names none."""
        required = schema.get("required", ())
        named = schema.get("properties") or {}
        properties = {key: value for key, value in named.items() if key in required or value is not False}
        properties |= {key: True for key in required if key not in properties}
        others = schema.get("additionalProperties", True)
        if not properties:
            return self._put('"{}"') if others is False else self._open_object(self.rule(others))
        unread = [key for key in properties if not re.fullmatch(_KEY, key)]
        if unread:
            raise refusal("tool call", "keys that the format reads as they are written", repr(unread), "rename them")
        base = self._put('"{" ' + f'{self._name}_{len(self.rules) + 1}_first_0 "}}"')
        begun = f"{self._name}_{len(self.rules)}"
        for at, (key, value) in enumerate(sorted(properties.items(), key=lambda item: item[0].lower())):
            made = self.rule(value)
            for place, before in (("first", ""), ("more", ",")):
                skipped = "" if key in required else f" | {begun}_{place}_{at + 1}"
                written = f"{self._terms(f'{before}{key}:')} {made} {begun}_more_{at + 1}"
                self.rules.append(f"{begun}_{place}_{at}: {written}{skipped}")
        self.rules += [f'{begun}_{place}_{len(properties)}: ""' for place in ("first", "more")]
        return base

    def _open_object(self, value: str) -> str:
        key = f"{self._name}_key_{len(self.rules)}".upper()
        self.rules.append(f"{key}: /{_KEY}/")
        return self._put(f'"{{}}" | "{{" {key} ":" {value} ("," {key} ":" {value})* "}}"')

    def _anything(self) -> str:
        return " | ".join(self._values_of_type(type, {}) for type in _TYPES)
