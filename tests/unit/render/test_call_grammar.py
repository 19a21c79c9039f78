"""Replies that have to call a tool, or may call some alone: in every format that is proven, every walk through the
grammar is a reply that parses to such calls, and what the format itself writes is allowed."""

from __future__ import annotations

import functools
import itertools
import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from formats import FORMATS, NO_TOOLS, format_renderer
from harmony import harmony_renderer
from refusals import refused_at
from short_formats import SHORT

from sparring.errors import BadInput
from sparring.generation import Constraint, GenerateRequest, Sampling
from sparring.render.demonstrate import reply_tokens
from sparring.render.grammars.call_format import WRITINGS, call_format
from sparring.testing.toy import toy_renderer
from sparring.types import Message, ToolCall, ToolSpec

VOCABULARY = ".harnesses/venv/lib/*/site-packages/litellm/litellm_core_utils/tokenizers/fb374d41*"
O200K = next(iter(Path(__file__).parents[3].glob(VOCABULARY)), Path(VOCABULARY))
TEXT = {"type": "string"}
LOOK = ToolSpec(
    name="look",
    description="Look.",
    parameters={
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "properties": {"at": {**TEXT, "maxLength": 9}, "near": {"$ref": "#/$defs/near"}},
        "required": ["at"],
        "additionalProperties": False,
        "$defs": {"near": {"type": "boolean"}},
    },
)
LOOK_UP = ToolSpec(
    name="look_up",
    description="Look up.",
    parameters={
        "properties": {"word": {"enum": ["<tool_call>", "</tool_call>", "é"]}},
        "required": ["word"],
        "additionalProperties": False,
    },
)
WRITE = ToolSpec(
    name="write",
    description="Write.",
    parameters={
        "type": "object",
        "properties": {
            "text": TEXT,
            "kind": {**TEXT, "enum": ["a", "ab", "b c"]},
            "lines": {"type": "array", "items": TEXT},
            "options": {"type": "object"},
            "limit": {"anyOf": [TEXT, {"type": "null"}, {"type": "integer"}, {"type": "array", "items": TEXT}]},
            "count": {"type": "integer", "minimum": 0, "maximum": 9},
            "code": {**TEXT, "pattern": "^[a-z]{2,3}$"},
            "any": {},
            "or": {"type": ["string", "null"]},
        },
        "required": ["text"],
    },
)
PING = ToolSpec(name="ping", description="Ping.", parameters={})
OTHER = ToolSpec(name="other", description="Another.", parameters={"type": "object", "properties": {}})
TOOLS = (LOOK, LOOK_UP, WRITE, PING, OTHER)
ALLOWED = {tool.name: tool for tool in TOOLS if tool is not OTHER}
QUESTION = Message(role="user", content="?")
HARMONY = pytest.param("gpt-oss", marks=pytest.mark.harness)
"""gpt-oss, whose vocabulary comes with a package that `make test-harness` installs."""

SMALL = (*(name for name in FORMATS if name not in NO_TOOLS), "template")
PROVEN = (*SMALL, HARMONY)
TEXT_MAY_CALL = ("deepseek-v4", "llama-3")
ENDS = ("\n</parameter>", "</parameter>", "</invoke>", "</arg_value>", "</", '"', "]", "}", "\n</tool_call>")
FORGED = (
    *("<tool_call>", "</tool_call>", "</think>", "<function=other>", '<invoke name="other">', "</｜DSML｜invoke>"),
    *("<", "\n", " ", "é", "\\", "null", "nullable", "true", "1", '"x"', '{"name": "other", "arguments": {}}'),
)


def renderer_of(name: str, thinking: bool) -> Any:
    if name == "gpt-oss":
        return harmony_renderer(O200K)
    return toy_renderer(name="template", thinking=thinking) if name == "template" else format_renderer(name, thinking)


def constraint(*tools: ToolSpec, parallel: bool = True, text: bool = False) -> Constraint:
    listed = [{"name": tool.name, "parameters": tool.parameters} for tool in tools]
    return Constraint(kind="tool_call", source=json.dumps({"tools": listed, "parallel": parallel, "text": text}))


def rule(renderer: Any, held: Constraint, prompt: tuple[int, ...] = (1,)) -> Any:
    request = GenerateRequest(id="r", tokens=prompt, sampling=Sampling(constraint=held, stop=renderer.stop_ids))
    return renderer.bind(request).allowed


def ids(allowed: bytes) -> list[int]:
    bits = np.unpackbits(np.frombuffer(allowed, np.uint8), bitorder="little")
    return list(map(int, np.flatnonzero(bits)))


def may_follow(allowed: bytes, token: int) -> bool:
    return bool(allowed[token >> 3] >> (token & 7) & 1)


@functools.cache
def pieces(renderer: Any) -> list[list[int]]:
    """Ids of what may end a value, as the format writes it, and of what looks like that and is plain text."""
    tokenizer = renderer.tokenizer
    written = [tokenizer.encode(text) for text in (*ENDS, "</｜DSML｜parameter>")]
    return written + [tokenizer.control.encode(tokenizer.control.marked(text)) for text in (*ENDS, *FORGED)]


def walk(renderer: Any, allowed: Any, draw: random.Random) -> list[int]:
    """Sample a reply: any token that may follow. Tags are drawn more often, and so are pieces as far as they are
    allowed."""
    tokens: list[int] = []
    tags = set(renderer.control_ids.values())
    while not tokens or tokens[-1] not in renderer.stop_ids:
        if draw.random() < 0.5:
            for token in draw.choice(pieces(renderer)):
                if not may_follow(allowed(tokens), token):
                    break
                tokens.append(token)
        following = ids(allowed(tokens))
        assert following, renderer.decode(tokens)
        ends = [token for token in following if token in tags]
        tokens.append(draw.choice(ends if ends and draw.random() < 0.4 else following))
        assert len(tokens) < 6000
    return tokens


def judge(reply: Message, *, text: bool = False) -> set[Any]:
    """Check that a reply has calls alone, of allowed tools and valid; return what it shows."""
    assert text or (reply.tool_calls and not reply.content), reply
    for call in reply.tool_calls:
        assert call.name in ALLOWED and call.arguments is not None, reply
        jsonschema.validate(call.arguments, ALLOWED[call.name].parameters)
    seen = {("thought", bool(reply.reasoning)), ("text", bool(reply.content)), min(len(reply.tool_calls), 2)}
    return (
        seen | {call.name for call in reply.tool_calls} | {key for call in reply.tool_calls for key in call.arguments}
    )


def walk_grammar(name: str, thinking: bool, held: Constraint, walks: int) -> set[Any]:
    renderer = renderer_of(name, thinking)
    prompt = renderer.render([QUESTION], TOOLS).tokens
    seen: set[Any] = set()
    allowed, draw = rule(renderer, held), random.Random(7)
    for _ in range(walks):
        text = json.loads(held.source)["text"]
        seen |= judge(renderer.parse(walk(renderer, allowed, draw), TOOLS, prompt=prompt), text=text)
    return seen


def test_the_short_suite_has_a_format_of_every_writing() -> None:
    assert {WRITINGS.get(name) for name in SHORT} == {WRITINGS.get(name) for name in SMALL}


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("name", PROVEN)
def test_random_walks_through_a_grammar_parse_as_calls(name: str, thinking: bool) -> None:
    seen = walk_grammar(name, thinking, constraint(*ALLOWED.values()), 5)
    assert 0 not in seen and len(seen & ALLOWED.keys()) > 1


@pytest.mark.slow
@pytest.mark.parametrize(("thinking", "parallel"), [(False, True), (True, False)])
@pytest.mark.parametrize("name", SMALL)
def test_many_random_walks_parse_as_calls(name: str, thinking: bool, parallel: bool) -> None:
    format = call_format(renderer_of(name, thinking), renderer_of(name, thinking).tokenizer)
    seen = walk_grammar(name, thinking, constraint(*ALLOWED.values(), parallel=parallel), 150)
    assert ALLOWED.keys() | {1, "text"} <= seen
    assert (2 in seen) == (parallel and bool(format.between))
    assert (("thought", True) in seen) == (format.thought is not None)


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("name", [name for name in PROVEN if name not in TEXT_MAY_CALL])
def test_random_walks_parse_as_text_or_allowed_calls(name: str, thinking: bool) -> None:
    assert ("text", True) in walk_grammar(name, thinking, constraint(*ALLOWED.values(), text=True), 5)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SMALL if name not in TEXT_MAY_CALL])
def test_many_random_walks_parse_as_text_or_allowed_calls(name: str) -> None:
    seen = walk_grammar(name, True, constraint(*ALLOWED.values(), text=True), 150)
    assert {0, 1, ("text", True), ("text", False)} <= seen and len(seen & ALLOWED.keys()) > 1


def calls_of(name: str, *made: tuple[str, dict[str, Any]]) -> tuple[ToolCall, ...]:
    """Calls with the ids that the format writes."""
    id = WRITINGS[name].id if name in WRITINGS else "call_{number}"
    return tuple(
        ToolCall(id=id.format(name=called, number=at), name=called, arguments=arguments)
        for at, (called, arguments) in enumerate(made)
    )


TEXTS = ("é\n\tx", '"quoted" \\ {', "if a < b and c </ d:\n    pass", "<b>", "")


def written(name: str, thinking: bool, texts: Sequence[str] = ("",)) -> list[tuple[int, ...]]:
    """Replies of calls, with a thought and without, behind each text, as the format itself writes them."""
    renderer = renderer_of(name, thinking)
    made = [[("write", {"text": text, "lines": ["a", text], "count": 3})] for text in TEXTS]
    made += [[("look", {"at": "<b>", "near": False}), ("ping", {})], [("ping", {}), ("look", {"at": "b"})], []]
    replies = []
    for calls, reasoning, text in itertools.product(made, (None, "So: \n\n it <b>is."), texts):
        reply = Message(role="assistant", content=text, reasoning=reasoning, tool_calls=calls_of(name, *calls))
        try:
            tokens = reply_tokens(renderer, reply, TOOLS)
        except BadInput:
            continue  # a format that takes one call, or no thought here
        read = renderer.parse(tokens, TOOLS, prompt=renderer.render([QUESTION], TOOLS).tokens)
        same = [(call.name, call.arguments) for call in read.tool_calls] == calls
        if same and (calls or text):
            replies.append(tokens)
    return replies


def accepts(renderer: Any, allowed: Any, tokens: Sequence[int]) -> None:
    for at, token in enumerate(tokens):
        assert may_follow(allowed(tokens[:at]), token), renderer.decode(tokens[:at])
        if token in renderer.stop_ids:
            return
    assert set(renderer.stop_ids) & set(ids(allowed(tokens))), renderer.decode(tokens)


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("name", PROVEN)
def test_rendered_calls_are_allowed_and_text_is_not(name: str, thinking: bool) -> None:
    renderer = renderer_of(name, thinking)
    allowed = rule(renderer, constraint(*ALLOWED.values()))
    replies = written(name, thinking)
    assert len(replies) >= 4
    for tokens in replies:
        accepts(renderer, allowed, tokens)
    assert not set(ids(allowed([]))) & set(renderer.stop_ids)


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("name", [name for name in PROVEN if name not in TEXT_MAY_CALL])
def test_rendered_texts_and_calls_are_allowed_if_both_may_be(name: str, thinking: bool) -> None:
    renderer = renderer_of(name, thinking)
    allowed = rule(renderer, constraint(*ALLOWED.values(), text=True))
    replies = written(name, thinking, ("", "Hi <b>there</b>."))
    assert len(replies) >= 9
    for tokens in replies:
        accepts(renderer, allowed, tokens)
    calls = calls_of(name, ("other", {}))
    for reasoning in (None, "So."):
        reply = Message(role="assistant", content="Hi.", reasoning=reasoning, tool_calls=calls)
        try:
            forbidden = reply_tokens(renderer, reply, TOOLS)
        except BadInput:
            continue
        with pytest.raises(AssertionError):
            accepts(renderer, allowed, forbidden)


def test_a_reply_without_a_call_is_not_allowed_under_required() -> None:
    renderer = toy_renderer()
    allowed = rule(renderer, constraint(LOOK))
    with pytest.raises(ValueError, match="expected tokens that it allows"):
        allowed(renderer.tokenizer.encode("Hello"))
    calls = calls_of("qwen3", ("look", {"at": '"<b>\n', "near": True}))
    within = reply_tokens(renderer, Message(role="assistant", tool_calls=calls), TOOLS)
    inside = within[: len(within) // 2]
    assert not set(ids(allowed(inside))) & set(renderer.control_ids.values()), "no tag within the arguments"


def spec(name: str = "a", **parameters: Any) -> ToolSpec:
    return ToolSpec(name=name, description="", parameters=parameters)


@pytest.mark.parametrize(
    ("format", "held", "message"),
    [
        ("qwen3", constraint(), "a tool to call"),
        ("qwen3", constraint(spec('a"b')), "tools with plain names"),
        ("qwen3", constraint(spec(properties={"b": {"type": "no"}})), "compiles"),
        ("qwen3", Constraint(kind="tool_call", source="{}"), "compiles"),
        ("kimi-k2", constraint(spec("a:b")), "names that the format reads"),
        ("qwen3.5", constraint(spec("a>b")), "names that the format reads"),
        ("qwen3.5", constraint(spec(properties={"a>b": TEXT})), "names that the format reads"),
        ("qwen3.5", constraint(spec(**{"not": {}})), "told apart by their names, got not"),
        ("qwen3.5", constraint(spec(anyOf=[])), "parameters that allow a call"),
        ("qwen3.5", constraint(spec(properties={"b": {**TEXT, "const": "</parameter>"}})), "write between tags"),
        ("qwen3.5", constraint(spec(properties={"b": {**TEXT, "pattern": "("}})), "invalid regex"),
        ("qwen3.5", constraint(spec(properties={"b": {"patternProperties": {"^<.*": {}}}})), "keys that write no tag"),
        ("template", constraint(spec(properties={"b": {"const": "<tool_call>"}})), "a value that writes no tag"),
        ("template", constraint(spec(properties={"<tool_call>": TEXT})), "keys that write no tag"),
        ("gemma4", constraint(spec("a{b")), "names that the format reads"),
        ("gemma4", constraint(spec(properties={"a:b": TEXT})), "keys that the format reads as they are written"),
        ("gemma4", constraint(spec(properties={"b": {"uniqueItems": True}})), "kept outside JSON, got uniqueItems"),
        ("gemma4", constraint(spec(properties={"b": {"const": '<|"|>'}})), "a list of values that the format can"),
        ("gemma4", constraint(spec(properties={"b": {"$ref": "#/c"}})), "references into the schema itself, got '#/c'"),
        ("gemma4", constraint(spec(properties={"b": {"oneOf": [TEXT, TEXT]}})), "exclude each other, .* got oneOf"),
        ("gemma4", constraint(spec(properties={"b": {**TEXT, "anyOf": [{"not": {}}]}})), "kept between tags, got not"),
        ("gemma4", constraint(spec(properties={"b": False}, required=["b"])), "a schema that allows a value"),
        ("gemma4", constraint(spec(properties={"b": {"type": "no"}})), "a type of JSON"),
        ("llama-3", constraint(LOOK, text=True), "a format in which a token of its own begins a call"),
    ],
)
def test_invalid_tools_are_refused(format: str, held: Constraint, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        rule(renderer_of(format, False), held)


@pytest.mark.parametrize("name", NO_TOOLS)
def test_a_format_that_has_no_place_for_tools_is_refused_by_name(name: str) -> None:
    with refused_at("tool call", "a format whose calls are known"):
        rule(format_renderer(name), constraint(LOOK))


@pytest.mark.harness
@pytest.mark.parametrize("text", [False, True])
def test_a_call_in_the_commentary_channel_as_gpt_oss_samples_it_is_allowed(text: bool) -> None:
    """The format writes a call back with its name before the channel; models write it behind."""
    renderer = renderer_of("gpt-oss", False)
    allowed = rule(renderer, constraint(*ALLOWED.values(), text=text))
    prompt = renderer.render([QUESTION], TOOLS).tokens
    said = "<|end|><|start|>assistant<|channel|>final<|message|>Hi."
    for lead in ("", "So.", *(("So." + said, said) if text else ())):
        called = '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"at": "b"}<|call|>'
        tokens = renderer.tokenizer.encode(f"{lead}<|end|><|start|>assistant{called}")
        accepts(renderer, allowed, tokens)
        reply = renderer.parse(tokens, TOOLS, prompt=prompt)
        assert [(call.name, call.arguments) for call in reply.tool_calls] == [("look", {"at": "b"})]
        assert reply.content == ("Hi." if said in lead else "")
    refused = renderer.tokenizer.encode("So.<|end|><|start|>assistant<|channel|>commentary to=functions.other")
    with pytest.raises((AssertionError, ValueError)):
        accepts(renderer, allowed, refused)


STEP = {"$ref": "#/$defs/step"}
PLAN = ToolSpec(
    name="plan",
    description="Plan.",
    parameters={
        "type": "object",
        "properties": {
            "Steps": {"type": "array", "items": STEP, "minItems": 1, "maxItems": 2},
            "at": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
            "who": {"anyOf": [{**TEXT, "minLength": 2}, {"type": "null"}]},
            "kind": {"enum": ['a"b', 3, None, {"k": [True]}, '<|"|>']},
            "counts": {"type": "object", "additionalProperties": {"type": "integer"}},
            "one": {"oneOf": [{**TEXT, "maxLength": 0}, {"type": "boolean"}]},
        },
        "required": ["Steps", "any"],
        "$defs": {
            "step": {
                "type": "object",
                "properties": {"name": {**TEXT, "pattern": "^[a-z]+$"}, "next": {"anyOf": [STEP, {"type": "null"}]}},
                "required": ["name"],
            }
        },
    },
)


def test_values_between_quotes_of_their_own_keep_to_their_schemas() -> None:
    renderer = renderer_of("gemma4", False)
    allowed, draw = rule(renderer, constraint(PLAN)), random.Random(3)
    prompt, seen = renderer.render([QUESTION], [PLAN]).tokens, set()
    for _ in range(20):
        for call in renderer.parse(walk(renderer, allowed, draw), [PLAN], prompt=prompt).tool_calls:
            assert call.name == "plan" and call.arguments is not None
            jsonschema.validate(call.arguments, PLAN.parameters)
            seen |= call.arguments.keys()
    assert seen == PLAN.parameters["properties"].keys() | {"any"}

    def reads(**values: Any) -> Any:
        made = {"Steps": [{"name": "a"}], "any": None, **values}
        reply = Message(role="assistant", tool_calls=(ToolCall(id="call_0", name="plan", arguments=made),))
        tokens = reply_tokens(renderer, reply, [PLAN])
        try:
            accepts(renderer, allowed, tokens)
        except (AssertionError, ValueError):
            return "refused"
        assert renderer.parse(tokens, [PLAN], prompt=prompt).tool_calls[0].arguments == made
        return list(values.values())

    def all_are_read(key: str, *values: Any) -> bool:
        return all(reads(**{key: value}) == [value] for value in values)

    def none_is_read(key: str, *values: Any) -> bool:
        return all(reads(**{key: value}) == "refused" for value in values)

    nested = {"name": "a", "next": {"name": "b", "next": None}}
    assert all_are_read("Steps", [nested], [nested, {"name": "c"}])
    assert none_is_read("Steps", [], [nested] * 3, [{"name": "A"}], [{"next": None}], nested)
    assert all_are_read("at", 1, 0.25) and none_is_read("at", 0, 1.5, "1", True)
    assert all_are_read("who", None, " }],\n", "<|tool_call>", "true", "10") and none_is_read("who", "", "a", 1)
    assert all_are_read("kind", 'a"b', 3, None, {"k": [True]}) and none_is_read("kind", "3", {"k": []}, '<|"|>')
    assert all_are_read("counts", {}, {"a b": 1, "é": -2}) and none_is_read("counts", {"a": "1"}, {"a,b": 1}, [])
    assert all_are_read("one", "", True) and none_is_read("one", "x", None)
    assert all_are_read("any", "x", {"a": [{}, [], "", 1.5e-7]}, [[None]]) and none_is_read("other", 1)


@pytest.mark.parametrize("text", [False, True])
def test_a_thought_begun_by_the_prompt_ends_before_the_call(text: bool) -> None:
    """Behind an answer of a tool, gemma4 begins the thought; behind a question, the policy does."""
    renderer = renderer_of("gemma4", True)
    called = Message(role="assistant", tool_calls=(ToolCall(id="call_0", name="ping", arguments={}),))
    answer = Message(role="tool", content="pong", tool_call_id="call_0", name="ping")
    prompt = renderer.render([QUESTION, called, answer], TOOLS).tokens
    assert renderer.decode(prompt).endswith("<|channel>thought\n")
    allowed, draw = rule(renderer, constraint(*ALLOWED.values(), text=text), prompt), random.Random(5)
    seen: set[Any] = set()
    for _ in range(15):
        seen |= judge(renderer.parse(walk(renderer, allowed, draw), TOOLS, prompt=prompt), text=text)
    assert {("thought", True), ("text", text)} <= seen and seen & ALLOWED.keys()


def test_values_between_tags_are_texts_where_the_schema_says_so_and_json_elsewhere() -> None:
    renderer = renderer_of("qwen3.5", False)
    tool = replace(WRITE, parameters={**WRITE.parameters, "required": []})
    allowed = rule(renderer, constraint(tool))

    def reads(key: str, value: str) -> Any:
        text = f"<tool_call>\n<function=write>\n<parameter={key}>\n{value}\n</parameter>\n</function>\n</tool_call>"
        tokens = renderer.tokenizer.encode(text)
        try:
            accepts(renderer, allowed, tokens)
        except (AssertionError, ValueError):
            return "refused"
        return renderer.parse(tokens, [tool]).tool_calls[0].arguments[key]

    assert [reads("text", value) for value in ("1", '"x"', " a\n")] == ["1", '"x"', " a\n"]
    assert [reads("limit", value) for value in ("1", "null", "None", "nullable", '["x"]', '"x"', "1.5", "[x")] == [
        *(1, None, None, "nullable", ["x"], '"x"'),
        *["refused"] * 2,
    ]
    assert [reads("or", value) for value in ('"x"', "null", "None", " x\n", "1")] == [
        '"x"',
        None,
        None,
        " x\n",
        "refused",
    ]
    assert [reads("any", value) for value in ('{"a": 1}', "1", "True", "x", "{x")] == [
        {"a": 1},
        1,
        True,
        "x",
        "refused",
    ]
    assert [reads("code", value) for value in ("ab", "abcd", "")] == ["ab", "refused", "refused"]
    assert [reads("kind", value) for value in ("a", "ab", "b c", "b")] == ["a", "ab", "b c", "refused"]
    assert [reads("count", value) for value in ("9", "10", '"1"')] == [9, "refused", "refused"]
    assert [reads("lines", value) for value in ('["<b>"]', '["</parameter>"]')] == [["<b>"], "refused"]
