"""Values made up from a JSON schema, which fit it: to try how a format writes and parses calls, and for trials."""

from __future__ import annotations

import itertools
import json
import math
import random
import re
import string
from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction
from typing import Any

import jsonschema

from sparring.errors import BadInput, boundary, refusal
from sparring.render.calls.schemas import FORMATS, KINDS, Schema, kinds_of_branch, same_json, schema_of, text_matcher

_TEXTS = (
    "text",
    'print("a\\n", \'b\')\nif 1 < 2 and 3 > 2:\n    print("数 é 🙂 \\\\ {x} </p>")',
    "    return x\n",
    "",
    "\n<b>a & b</b>\t",
)
"""Texts with quotes, newlines, blanks at the ends, accents and markup. None is valid JSON, because under a schema that
allows text and other types, valid JSON is not parsed as text."""

_CHECKER = jsonschema.Draft202012Validator.FORMAT_CHECKER
_FORMATTED = {
    "date": "2026-01-31",
    "time": "10:20:30Z",
    "date-time": "2026-01-31T10:20:30Z",
    "duration": "P1DT2H",
    **dict.fromkeys(("email", "idn-email"), "a@example.com"),
    **dict.fromkeys(("hostname", "idn-hostname"), "example.com"),
    "ipv4": "192.0.2.1",
    "ipv6": "2001:db8::1",
    **dict.fromkeys(("uri", "iri", "uri-reference", "iri-reference", "uri-template", "url"), "https://example.com/"),
    "uuid": "123e4567-e89b-42d3-a456-426614174000",
    "json-pointer": "/a",
    "relative-json-pointer": "0",
    "regex": "a+",
}
"""Text of each format that JSON Schema knows."""

_SCALARS: Mapping[str, tuple[Any, ...]] = {
    "number": (1, -1.5, 2e-7),
    "integer": (1, -12, 2**53 + 1),
    "boolean": (True, False),
    "null": (None,),
}
_OBJECT = {"list": [1, None, True], "empty": "", "é": {"a": "x y"}}
_ORDER = ("string", "number", "integer", "boolean", "null", "array", "object")
_MOST = 8
"""Maximum number of values of a schema, not counting the object of required properties alone."""

_FULL, _DEEPEST = 2, 12
"""Depth from which objects have their required properties alone, and maximum depth of values."""

_PLAIN = string.ascii_uppercase + string.digits
_TRIES, _LONGEST = 20, 100
"""Walks through a grammar for a text, and maximum number of bytes of each beyond the text's `minLength`."""


def sample_arguments(parameters: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield distinct sets of arguments of a tool that fit its schema: all properties, with values of each type that the
    schema allows, and the required properties alone.

    Raises:
        BadInput: the schema cannot be read, or no value of it is found.
    """
    root = schema_of(parameters)
    yield from _found(root, {**root.top, "type": "object"})


def value_of(schema: Any) -> Any:
    """Return a value that fits a JSON schema: its default or an example, if it has any.

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
            self._made[key] = []  # a value inside of itself is none
            branches = [] if depth > _DEEPEST else self._root.branches(schema)
            made = _in_turns(self._of_branch(branch, depth) for branch in branches)
            fitting: list[Any] = []
            for value in made:
                if len(fitting) <= _MOST and not any(same_json(value, other) for other in fitting):
                    fitting += [value] if self._fits(value, schema) else []
            self._made[key] = fitting
        return self._made[key]

    def _fits(self, value: Any, schema: Any) -> bool:
        validator = jsonschema.Draft202012Validator(self._root.alone(schema), format_checker=_CHECKER)
        return validator.is_valid(value)

    def _of_branch(self, branch: Mapping[str, Any], depth: int) -> Iterator[Any]:
        if "enum" in branch:
            return iter(branch["enum"])
        examples = branch.get("examples")
        told = [branch[key] for key in ("default", "example") if key in branch]
        told += examples if isinstance(examples, list) else []
        kinds = kinds_of_branch(branch)
        if "integer" in kinds and "number" in kinds and kinds != KINDS:
            kinds -= {"integer"}
        made = {"array": self._arrays, "object": self._objects}
        typed = (
            made[kind](branch, depth) if kind in made else _scalars(kind, branch) for kind in _ORDER if kind in kinds
        )
        return itertools.chain(told, _in_turns(typed))

    def _arrays(self, branch: Mapping[str, Any], depth: int) -> Iterator[Any]:
        before = [self.values(part, depth + 1)[:1] for part in branch.get("prefixItems", ())]
        before += [self.values(branch["contains"], depth + 1)[:1]] if "contains" in branch else []
        first = [value for values in before for value in values]
        items = self.values(branch.get("items", True), depth + 1) if depth < _FULL or branch.get("minItems") else []
        least, most = branch.get("minItems", 0), branch.get("maxItems", math.inf)
        for size in dict.fromkeys((max(least, min(most, 2)), least)):
            for at in range(max(1, len(items))):
                pool = [*items[at:], *items[:at]]
                if branch.get("uniqueItems"):
                    pool += [*range(2, size + 2), *(f"text {number}" for number in range(size))]
                    pool = [value for value in pool if self._fits(value, branch.get("items", True))]
                more = itertools.islice(itertools.cycle(pool), max(0, int(size) - len(first)))
                yield [*first, *more]
        yield first[: int(min(most, len(first)))]

    def _objects(self, branch: Mapping[str, Any], depth: int) -> Iterator[Any]:
        required = branch.get("required", ())
        names = [name for name in branch.get("properties") or () if depth < _FULL or name in required]
        names += [name for name in required if name not in names]
        values = {name: self.values(self._root.member(branch, name), depth + 1) for name in names}
        values = {name: made for name, made in values.items() if made or name in required}
        if not all(values.values()):
            return
        if not values:
            yield dict(_OBJECT)
        free = {} if depth >= _FULL and not branch.get("minProperties") else self._free(branch, depth)
        least = branch.get("minProperties", 0)
        for more in ({}, free):
            for at in range(max(map(len, values.values()), default=1) if len(values) + len(more) >= least else 0):
                yield {name: made[at % len(made)] for name, made in values.items()} | more
                if at == 0:
                    yield {name: made[0] for name, made in values.items() if name in required}

    def _free(self, branch: Mapping[str, Any], depth: int) -> dict[str, Any]:
        """Return values under keys that the schema does not name."""
        count = max(1, branch.get("minProperties", 0))
        names = [made for pattern in branch.get("patternProperties") or () for made in _walks({"pattern": pattern})]
        names += self.values({"type": "string", "allOf": [branch.get("propertyNames", True)]}, depth + 1)[:1]
        if not branch.get("propertyNames"):
            names += [f"key {number}" for number in range(count)]
        made = {name: self.values(self._root.member(branch, name), depth + 1) for name in names}
        return dict(itertools.islice(((name, values[0]) for name, values in made.items() if values), count))


def _in_turns(several: Iterable[Iterable[Any]]) -> Iterator[Any]:
    """Yield the first of each, then the second of each, and so on."""
    nothing = object()
    for values in itertools.zip_longest(*several, fillvalue=nothing):
        yield from (value for value in values if value is not nothing)


def _scalars(kind: str, branch: Mapping[str, Any]) -> Iterable[Any]:
    if kind == "string":
        return _texts(branch)
    return _numbers(kind, branch) if kind in ("number", "integer") else _SCALARS[kind]


def _texts(branch: Mapping[str, Any]) -> Iterator[str]:
    least, most = branch.get("minLength", 0), branch.get("maxLength", math.inf)
    if branch.get("format") in _FORMATTED:
        yield _FORMATTED[branch["format"]]
        yield from _walks(branch) if {"pattern", "minLength", "maxLength", "allOf"} & branch.keys() else ()
        return
    patterns = [part.get("pattern", "") for part in (branch, *branch.get("allOf", ()))]
    for word in ("text ", *re.findall(r"\w+|[^\x00-\x7f]", " ".join(patterns))):
        yield (word * (least // len(word) + 1))[: max(least, int(min(most, len(word.strip()))))]
    if {"pattern", "allOf"} & branch.keys():
        yield from _walks(branch)
    yield from _TEXTS


def _numbers(kind: str, branch: Mapping[str, Any]) -> Iterator[int | float]:
    yield _SCALARS[kind][0]
    parts = [branch, *branch.get("allOf", ())]
    steps = [Fraction(str(part["multipleOf"])) for part in parts if "multipleOf" in part] or [Fraction(1)]
    step = Fraction(math.lcm(*(each.numerator for each in steps)), math.gcd(*(each.denominator for each in steps)))
    limits = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
    ends = [Fraction(str(branch[key])) for key in limits if key in branch]
    thousandth = Fraction(1, 1000)
    near = [(end // step + add) * step for end in ends for add in (0, 1, -1)]
    near += [end + add for end in ends for add in (0, thousandth, -thousandth)]
    near += [sum(ends, Fraction()) / len(ends)] if ends else []
    for value in (*near, Fraction(0), step, -step):
        yield int(value) if value.denominator == 1 else float(value)
    yield from _SCALARS[kind]


def _walks(schema: Mapping[str, Any]) -> Iterator[str]:
    """Yield texts of a schema, each found by a walk through its grammar that ends as soon as it can."""
    limits = ("pattern", "minLength", "maxLength", "allOf", *(["format"] if schema.get("format") in FORMATS else []))
    kept = {key: schema[key] for key in limits if key in schema}
    start = text_matcher({"type": "string", **kept})
    if not kept or start.is_error():
        return
    for seed in range(_TRIES):
        chance, matcher, written = random.Random(seed), start.deep_copy(), bytearray()
        while not matcher.is_stopped() and len(written) < _LONGEST + schema.get("minLength", 0):
            mask = matcher.compute_bitmask()
            allowed = [byte for byte in range(256) if mask[byte // 8] >> byte % 8 & 1 and byte != ord("\\")]
            plain = [byte for byte in allowed if chr(byte) in _PLAIN] or allowed or [ord('"')]
            byte = ord('"') if ord('"') in allowed else chance.choice(plain)
            matcher.consume_token(byte)
            written.append(byte)
            if len(written) > 1 and byte == ord('"'):
                yield json.loads(written.decode("utf-8", "replace"))
                break
