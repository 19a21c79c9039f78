"""Schemas are read where they are: by readers of values, grammars of forced calls, and makers of values."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from formats import format_renderer

from sparring.errors import BadInput
from sparring.generation import Constraint
from sparring.render.calls.samples import sample_arguments, value_of
from sparring.render.calls.schemas import FORMATS as KNOWN
from sparring.render.calls.schemas import fits_pattern, schema_of, text_matcher
from sparring.render.demonstrate import reply_tokens
from sparring.render.grammars.grammar import Grammars
from sparring.types import Message, ToolCall, ToolSpec

CITY = {"type": "object", "properties": {"city": {"enum": ["Rome"]}}, "required": ["city"]}
SIZE = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
NODE = {
    "type": "object",
    "properties": {"next": {"anyOf": [{"$ref": "#/$defs/N"}, {"type": "null"}]}},
    "required": ["next"],
}
FIT: list[Any] = [
    {"$ref": "#/$defs/a~1b%20c", "$defs": {"a/b c": CITY}},
    {"$ref": "#/$defs/N", "$defs": {"N": NODE}},
    {"$id": "https://x.y/s", "$defs": {"q": {"$anchor": "here", "type": "boolean"}}, "$ref": "#here"},
    {"type": "object", "properties": {"a": {"$ref": "#/properties/b"}, "b": {"minimum": 4}}, "required": ["a"]},
    {"allOf": [CITY, SIZE], "properties": {"n": {"multipleOf": 7, "minimum": 1}}},
    {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    {"allOf": [{"multipleOf": 4}, {"multipleOf": 6}], "type": "integer", "minimum": 1},
    {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 0.5},
    {"type": "string", "pattern": "^[A-Z]{3}-\\d{2}$"},
    {"type": "string", "allOf": [{"pattern": "a"}, {"pattern": "b"}], "maxLength": 2},
    {"type": "string", "pattern": "\U0001f600+"},
    {"type": "string", "minLength": 9, "maxLength": 9},
    {"type": "string", "format": "date"},
    {"type": "string", "not": {"const": "text"}},
    {"type": "array", "uniqueItems": True, "minItems": 5, "items": {"type": "string"}},
    {"type": "array", "contains": {"const": 7}, "minItems": 3},
    {"type": "array", "prefixItems": [{"const": 1}, {"type": "null"}], "items": False, "minItems": 2},
    {"type": "object", "minProperties": 2, "additionalProperties": {"type": "integer"}},
    {"type": "object", "minProperties": 1, "patternProperties": {"^n_[a-z]{2}$": False, "^k": {"type": "null"}}},
    {"type": "object", "propertyNames": {"pattern": "^[A-Z]{4}$"}, "minProperties": 1},
    {"enum": [[1], {"a": 1}]},
    True,
]


@pytest.mark.parametrize("schema", FIT, ids=lambda schema: json.dumps(schema)[:60])
def test_values_that_are_made_fit_their_schema(schema: Any) -> None:
    fits = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker()).is_valid
    assert fits(value_of(schema))
    inside = {"type": "object", "properties": {"x": True if schema is True else {**schema, "$id": "urn:x"}}}
    for arguments in sample_arguments(inside):
        assert "x" not in arguments or fits(arguments["x"]), arguments


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"$ref": "https://x.y/z"}, "references into the schema itself, got 'https://x.y/z'"),
        ({"properties": {"a": {"$ref": "#/nope"}}}, "references into the schema itself, got '#/nope'"),
        ({"$ref": "#"}, "of which values can be made"),
        ({"enum": []}, "of which values can be made"),
        ({"type": "integer", "minimum": 5, "maximum": 4}, "of which values can be made"),
        ({"type": "string", "pattern": "("}, "of which values can be made"),
        (False, "of which values can be made"),
    ],
)
def test_what_no_value_fits_is_refused(schema: Any, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        value_of(schema)


def test_a_member_is_found_by_name_pattern_and_the_rest_in_time() -> None:
    root = schema_of({"patternProperties": {"^s_": {"type": "string"}}, "additionalProperties": {"type": "boolean"}})
    assert [root.kinds(root.member(root.top, name)) for name in ("s_a", "z")] == [{"string"}, {"boolean"}]
    assert not fits_pattern("(a+)+$", "a" * 60 + "b"), "a pattern that takes a backtracking search for ever"
    for key in ("allOf", "anyOf"):  # ten to the thirtieth ways to the end
        nested = {f"d{n}": {key: [{"$ref": f"#/$defs/d{n + 1}"}] * 10} for n in range(30)} | {"d30": {"type": "string"}}
        deep = schema_of({"$ref": "#/$defs/d0", "$defs": nested})
        assert "string" in deep.kinds(deep.top)


def test_alternatives_that_hold_themselves_are_not_taken_to_exclude_each_other() -> None:
    inside = {"type": "object", "properties": {"x": {"$ref": "#/$defs/n"}}, "required": ["x"]}
    nested = {"oneOf": [{"type": "null"}, inside, {**inside, "minProperties": 0}]}
    root = schema_of({"$ref": "#/$defs/n", "$defs": {"n": nested}})
    assert all("oneOf" in branch for branch in root.branches(root.top)), "an object fits two of them"


def test_formats_of_the_grammar_library_are_those_that_it_knows() -> None:
    others = ("path", "password", "binary", "regex", "idn-email", "uri-reference", "int32", "json-pointer", "cuid")
    for format in (*KNOWN, *others):
        assert text_matcher({"type": "string", "format": format}).is_error() == (format not in KNOWN), format


FORCED = {
    "$ref": ({"$ref": "#/definitions/A", "definitions": {"A": CITY}}, {"city": "Rome"}, {}),
    "allOf": ({"allOf": [CITY, SIZE]}, {"city": "Rome", "n": 1}, {"city": "Rome"}),
    "anyOf": ({"anyOf": [CITY, SIZE]}, {"n": 1}, {}),
    "format": ({"type": "object", "properties": {"p": {"type": "string", "format": "path"}}}, {"p": "a"}, None),
    "object by $ref": (
        {"type": "object", "properties": {"at": {"$ref": "#/$defs/P"}}, "required": ["at"], "$defs": {"P": SIZE}},
        {"at": {"n": 1}},
        {"at": {}},
    ),
    "number": ({"type": "object", "properties": {"x": {"type": "number"}}}, {"x": -1.5}, '{"x": 1e999}'),
    "any number": ({"type": "object", "properties": {"x": {"type": "array"}}}, {"x": [1.5]}, '{"x": [1e999]}'),
}


@pytest.mark.parametrize("case", FORCED)
@pytest.mark.parametrize("name", ["qwen3", "qwen3.5", "glm-5", "gemma4"])
def test_a_forced_call_has_the_arguments_of_its_schema(name: str, case: str) -> None:
    schema, allowed, refused = FORCED[case]
    renderer = format_renderer(name)
    tool = ToolSpec(name="look", description="Looks.", parameters=schema)
    prompt = renderer.render([Message(role="user", content="Hi")], [tool]).tokens
    grammars = Grammars(renderer.tokenizer, renderer.stop_ids, renderer)
    source = json.dumps({"tools": [{"name": "look", "parameters": schema}], "parallel": False, "text": False})
    constraint = Constraint(kind="tool_call", source=grammars.calls(source, prompt))
    for arguments, takes in ((allowed, True), (refused, False)):
        if arguments is not None:
            assert is_allowed(grammars.of(constraint), renderer, tool, arguments) is takes, arguments


def is_allowed(grammar: Any, renderer: Any, tool: ToolSpec, arguments: Any) -> bool:
    """Return whether a grammar allows the reply that calls a tool; arguments in JSON replace those of a dummy."""

    made = {"x": [7777]} if isinstance(arguments, str) and "[" in arguments else {"x": 7777}
    call = ToolCall(id="call_0", name="look", arguments=made if isinstance(arguments, str) else arguments)
    ids = list(reply_tokens(renderer, Message(role="assistant", tool_calls=(call,)), (tool,)))
    if isinstance(arguments, str):
        at = renderer.decode(ids).index("7777")
        head = next(n for n in range(len(ids)) if len(renderer.decode(ids[: n + 1])) > at)
        text = renderer.decode(ids[head:]).replace("7777", "1e999")
        ids = ids[:head] + list(renderer.tokenizer.encode(text))
    for at, token in enumerate(ids):
        bits = grammar(ids[:at])
        if not bits[token // 8] >> token % 8 & 1:
            return False
    return True
