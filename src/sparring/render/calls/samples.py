"""Sample values that fit a JSON schema, to try how a format writes and parses calls, and for scripted replies."""

from __future__ import annotations

import itertools
import json
import math
import random
import re
import string
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import jsonschema

from sparring.errors import BadInput, boundary, refusal
from sparring.render.calls.schemas import Schema, kinds_of_branch, same_json, schema_of, text_matcher

_TEXTS = (
    'print("a\\n", \'b\')\nif 1 < 2 and 3 > 2:\n    print("数 é 🙂 \\\\ {x} </p>")',
    "    return x\n",
    "",
    "\n<b>a & b</b>\t",
)
"""Texts with quotes, newlines, blanks at the ends, accents and markup. None is valid JSON, because under a schema that
allows text and other types, valid JSON is not parsed as text."""

_FORMATTED = (
    *("2026-01-31", "10:20:30Z", "2026-01-31T10:20:30Z", "P1DT2H", "a@example.com", "example.com", "192.0.2.1"),
    *("2001:db8::1", "https://example.com/", "123e4567-e89b-42d3-a456-426614174000", "/a", "0"),
)
"""Texts in the formats of JSON Schema's `format` keyword."""

_CHECKER = jsonschema.Draft202012Validator.FORMAT_CHECKER
_NUMBERS = (-12, 2**53 + 1, 0, -1.5, 2e-7)
_LIMITS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_WALKED = frozenset((*_LIMITS, "pattern", "minLength", "maxLength", "format", "allOf"))
"""Keywords that limit a number (`_LIMITS`), and keywords that limit a text or a number (`_WALKED`)."""

_OBJECT = {"list": [1, None, True], "empty": "", "é": {"a": "x y"}}
_ORDER = ("string", "number", "integer", "boolean", "null", "array", "object")
_MOST = 8
"""Maximum number of values of a schema, not counting the object of required properties alone."""

_FULL, _DEEPEST = 2, 12
"""Depth from which objects have only their required properties, and maximum depth of values."""

_PLAIN = string.ascii_uppercase + string.digits
_TRIES, _LONGEST = 20, 100
"""Number of random walks through a grammar, and maximum bytes of each beyond the `minLength` of a text."""


def sample_arguments(parameters: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield distinct sets of arguments of a tool that fit its schema: all properties, with values of each type that the
    schema allows, and the required properties alone.

    Raises:
        BadInput: the schema cannot be read, or no value of it is found.
    """
    root = schema_of(parameters)
    yield from _found(root, {**root.top, "type": "object"})


def value_of(schema: Any) -> Any:
    """Return a value that fits a JSON schema: the schema's default or example, if it has any.

    Raises:
        BadInput: the schema cannot be read, or no value of it is found.
    """
    root = schema_of(schema)
    return _found(root, root.top)[0]


def _found(root: Schema, schema: Any) -> list[Any]:
    with boundary(BadInput, "JSON schema", "a schema of which values can be made", "correct it"):
        values = _Maker(root).values(schema, 0)
    if not values:
        got = json.dumps(schema, ensure_ascii=False)[:200]
        raise refusal("JSON schema", "a schema of which values can be made", got, "make it plainer, or correct it")
    return values


class _Maker:
    def __init__(self, root: Schema) -> None:
        self._root = root
        self._made: dict[tuple[str, int], list[Any]] = {}

    def values(self, schema: Any, depth: int) -> list[Any]:
        """Return distinct values of a schema, the plainest first; empty if none is found."""
        key = json.dumps(schema), depth
        if key not in self._made:
            self._made[key] = []  # a schema inside itself has no values there
            branches = [] if depth > _DEEPEST else self._root.branches(schema)
            fitting: list[Any] = []
            for value in _in_turns(self._of_branch(branch, depth) for branch in branches):
                if len(fitting) <= _MOST and not any(same_json(value, other) for other in fitting):
                    fitting += [value] if self._fits(value, schema) else []
            self._made[key] = fitting
        return self._made[key]

    def _fits(self, value: Any, schema: Any) -> bool:
        validator = jsonschema.Draft202012Validator(self._root.alone(schema), format_checker=_CHECKER)
        return validator.is_valid(value)

    def _of_branch(self, branch: Mapping[str, Any], depth: int) -> Iterator[Any]:
        """Yield candidate values of a schema without alternatives; some may not fit."""
        if "enum" in branch:
            return iter(branch["enum"])
        examples = branch.get("examples")
        told = [branch[key] for key in ("default", "example") if key in branch]
        told += examples if isinstance(examples, list) else []
        kinds = kinds_of_branch(branch)
        kinds -= {"integer"} if "number" in kinds else set()
        made = {"array": self._arrays, "object": self._objects}
        typed = (
            made[kind](branch, depth) if kind in made else _scalars(kind, branch) for kind in _ORDER if kind in kinds
        )
        return itertools.chain(told, _in_turns(typed))

    def _arrays(self, branch: Mapping[str, Any], depth: int) -> Iterator[Any]:
        parts = [*branch.get("prefixItems", ()), *([branch["contains"]] if "contains" in branch else [])]
        first = [value for part in parts for value in self.values(part, depth + 1)[:1]]
        least, most = branch.get("minItems", 0), branch.get("maxItems", math.inf)
        items = branch.get("items", True)
        pool = self.values(items, depth + 1) if depth < _FULL or least else []
        if branch.get("uniqueItems"):
            more = (*range(2, least + 2), *(f"text {number}" for number in range(least)))
            pool = [*pool, *(value for value in more if self._fits(value, items))]
        for size in dict.fromkeys((max(least, min(most, 2)), least)):
            for at in range(max(1, len(pool))):
                turned = itertools.cycle([*pool[at:], *pool[:at]])
                yield [*first, *itertools.islice(turned, max(0, int(size) - len(first)))]
        yield first[: int(min(most, len(first)))]

    def _objects(self, branch: Mapping[str, Any], depth: int) -> Iterator[Any]:
        required, is_full = branch.get("required", ()), depth < _FULL
        names = dict.fromkeys((*((branch.get("properties") or ()) if is_full else ()), *required))
        values = {name: self.values(self._root.member(branch, name), depth + 1) for name in names}
        values = {name: made for name, made in values.items() if made or name in required}
        if not all(values.values()):
            return
        if not values:
            yield dict(_OBJECT)
        for more in ({}, self._free(branch, depth) if is_full or branch.get("minProperties") else {}):
            for at in range(max(map(len, values.values()), default=1)):
                yield {name: made[at % len(made)] for name, made in values.items()} | more
                if at == 0:
                    yield {name: made[0] for name, made in values.items() if name in required}

    def _free(self, branch: Mapping[str, Any], depth: int) -> dict[str, Any]:
        """Return values under keys that the schema does not name."""
        count = max(1, branch.get("minProperties", 0))
        limits: list[Any] = [{"pattern": pattern} for pattern in branch.get("patternProperties") or ()]
        limits += [branch["propertyNames"]] if "propertyNames" in branch else []
        keys = [key for each in limits for key in self.values({"type": "string", "allOf": [each]}, depth + 1)]
        keys += [f"key {number}" for number in range(count)]
        made = {key: self.values(self._root.member(branch, key), depth + 1) for key in keys}
        return dict(itertools.islice(((key, values[0]) for key, values in made.items() if values), count))


def _in_turns(several: Iterable[Iterable[Any]]) -> Iterator[Any]:
    """Yield the first item of each iterable, then the second item of each, and so on."""
    nothing = object()
    for values in itertools.zip_longest(*several, fillvalue=nothing):
        yield from (value for value in values if value is not nothing)


def _scalars(kind: str, branch: Mapping[str, Any]) -> Iterator[Any]:
    """Yield candidate values of a type, the plainest first; values from the schema's grammar come last."""
    if kind == "string":
        patterns = [part.get("pattern", "") for part in (branch, *branch.get("allOf", ()))]
        for word in ("text", *re.findall(r"\w+|[^\x00-\x7f]", " ".join(patterns))):
            yield (word * (branch.get("minLength", 0) // len(word) + 1))[: branch.get("maxLength")]
        yield from (*(_FORMATTED if "format" in branch else ()), *_TEXTS)
    elif kind in ("boolean", "null"):
        yield from (True, False) if kind == "boolean" else (None,)
    else:
        limits = [branch[key] for key in _LIMITS if key in branch]
        yield from (1, *limits, *([sum(limits) / len(limits)] if limits else []), *_NUMBERS)
    yield from _walks(kind, branch)


def _walks(kind: str, branch: Mapping[str, Any]) -> Iterator[Any]:
    """Yield values of a type, each from a random walk through the grammar of the limits, as short as possible."""
    kept = {key: branch[key] for key in _WALKED & branch.keys()}
    start = text_matcher({"type": kind, "x-guidance": {"lenient": True}, **kept})
    for seed in range(_TRIES if kept and not start.is_error() else 0):
        chance, matcher, written = random.Random(seed), start.deep_copy(), bytearray()
        while not matcher.is_accepting() and len(written) < _LONGEST + branch.get("minLength", 0):
            mask = matcher.compute_bitmask()
            allowed = [byte for byte in range(256) if mask[byte // 8] >> byte % 8 & 1 and byte != ord("\\")]
            plain = [byte for byte in allowed if chr(byte) in _PLAIN] or allowed or [ord('"')]
            byte = ord('"') if ord('"') in allowed else chance.choice(plain)
            matcher.consume_token(byte)
            written.append(byte)
        with suppress(ValueError):  # a walk that found no end
            yield json.loads(written.decode("utf-8", "replace"))
