"""What a reply means is what the format writes: values between tags, calls in thoughts, and replies to requests without
tools."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from formats import FORMATS, NO_TOOLS, format_renderer

from sparring.render.calls.between_tags import LAYOUTS
from sparring.render.calls.kinds import value_of
from sparring.render.calls.schemas import schema_of
from sparring.render.tags import FORMAT_TAGS
from sparring.testing.toy import toy_renderer
from sparring.types import Message, ToolCall, ToolSpec

TEXT = {"type": "string"}
EDIT = ToolSpec(
    name="edit",
    description="Edits.",
    parameters={
        "type": "object",
        "properties": {
            "old": TEXT,
            "mode": {"$ref": "#/$defs/mode"},
            "note": {"type": ["string", "null"]},
            "line": {"anyOf": [{"type": "integer"}, TEXT]},
            "all": {"type": "boolean"},
            "none": {"type": "null"},
            "any": {},
            "kind": {"enum": ["a", "b"]},
        },
        "$defs": {"mode": {"enum": ["fast", "slow"], **TEXT}},
    },
)
USER = Message(role="user", content="Who?")


def renderer_of(name: str, thinking: bool = False) -> Any:
    return toy_renderer(name="template", thinking=thinking) if name == "template" else format_renderer(name, thinking)


def written(name: str, **arguments: Any) -> list[int]:
    """Ids of a call as the format writes it into a conversation, without a thought and without the turn's end."""
    renderer = renderer_of(name)
    id = "functions.edit:0" if name.startswith("kimi") else "call_0"
    reply = Message(role="assistant", tool_calls=(ToolCall(id=id, name="edit", arguments=arguments),))
    whole = renderer.render([USER, reply], () if name in NO_TOOLS else [EDIT], generation=False)
    tokens = [token for token, sampled in zip(whole.tokens, whole.sampled, strict=True) if sampled]
    ends = [at for at, token in enumerate(tokens) if token in renderer.stop_ids]
    think_end = renderer.tokenizer.added_tokens.get(tag_of(name, 1))
    return tokens[tokens[0] == think_end : ends[0] if ends else None]


def read(renderer: Any, tokens: list[int], tools: tuple[ToolSpec, ...] = (EDIT,)) -> Message:
    prompt = renderer.render([USER], () if renderer.name in NO_TOOLS else [EDIT]).tokens
    message = renderer.parse(tokens, tools, prompt=prompt)
    reader, pieces = renderer.reader(tools, prompt=prompt), []
    for token in tokens:
        pieces += reader.read([token])
    shown = "".join(piece.text for piece in pieces if piece.kind == "text")
    assert message.content.startswith(shown)
    calls = tuple(piece.call for piece in pieces if piece.call is not None)
    assert message.tool_calls[: len(calls)] == calls
    return message


VALUES: tuple[dict[str, Any], ...] = (
    *(
        {"old": text}
        for text in ("    return x\n", "x\n\n", " ", "\n", "", "\tif a < b:\n", "True", "None", "1", '"q"')
    ),
    {"mode": "fast", "kind": "b", "note": "plain words", "line": "later", "any": "words"},
    {"note": None, "line": 12, "all": True, "none": None, "any": {"a": [1, None, " "]}, "undeclared": "words"},
    {"note": "12", "line": " 12", "all": False, "any": False, "kind": "a"},
    {"note": ' "quoted" ', "line": "12 lines", "any": '"quoted"'},
    {},
)


@pytest.mark.parametrize("name", ["template", *FORMATS])
def test_a_rendered_call_parses_to_its_arguments(name: str) -> None:
    renderer = renderer_of(name)
    for arguments in VALUES:
        tokens = written(name, **arguments)
        assert [call.arguments for call in read(renderer, tokens).tool_calls] == [arguments], renderer.decode(tokens)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_value_that_holds_the_closing_tag_is_malformed_or_kept_and_never_cut(name: str) -> None:
    """Where the tag is an id, its text is a text."""
    renderer = renderer_of(name)
    tag = LAYOUTS[name].close if not LAYOUTS[name].ids else "</arg_value>"
    tokens = written(name, old=f"a{tag}b", all=True)
    (call,) = read(renderer, tokens).tool_calls
    kept = {"old": f"a{tag}b", "all": True} if LAYOUTS[name].ids else None
    assert (call.name, call.arguments) == ("edit", kept)
    assert kept or f"a{tag}b" in call.raw


def kinds_of(schema: Any, beside: Any = None) -> frozenset[str]:
    root = schema_of({**schema, **(beside or {})} if isinstance(schema, dict) else schema)
    return root.kinds(root.top)


def test_types_of_a_schema_are_the_intersection_of_its_parts() -> None:
    assert kinds_of({}) == kinds_of(True) > kinds_of({"type": "number"}) == {"integer", "number"}
    assert kinds_of({"type": ["string", "null"], "enum": ["a", None, 1]}) == {"string", "null"}
    assert kinds_of({"allOf": [{"anyOf": [TEXT, {"type": "array"}]}, {"type": ["array", "object"]}]}) == {"array"}
    point = {"$defs": {"a/b c": {"oneOf": [{"type": "null"}, {"const": 1.5}]}}}
    assert kinds_of({"$ref": "#/$defs/a~1b%20c"}, point) == {"null", "number"}
    assert kinds_of({"anyOf": [{"$ref": "#"}, {"type": "null"}]}) == {"null"}
    circle = {"$defs": {"a": {"$ref": "#/$defs/a"}}}
    assert kinds_of({"$ref": "#/$defs/a"}, circle) == kinds_of({})
    assert value_of("230.0", {"type": "integer"}, schema_of({}), {}) == 230.0
    for schema, text in (({"type": "integer"}, "x"), ({"type": "boolean"}, "True"), ({"type": "array"}, "[" * 10_000)):
        with pytest.raises(ValueError):
            value_of(text, schema, schema_of({}), {})


def tag_of(name: str, place: int) -> str:
    tags = FORMAT_TAGS.get(name)
    own = {"gemma4": ("<|channel>thought\n", "<channel|>"), "inkling": ("<|content_thinking|>", "<|end_message|>")}
    return (own.get(name) or (tags and tags.think) or ("<think>", "</think>"))[place]


@pytest.mark.parametrize("name", FORMATS)
def test_thinks_agrees_with_the_library_on_the_whole_prompt(name: str) -> None:
    """The answer is remembered by the end of the prompt alone."""
    renderer = renderer_of(name, True)
    encode = renderer.tokenizer.encode
    begin, end = encode(tag_of(name, 0)), encode(tag_of(name, 1))
    reply = Message(role="assistant", content="Ada.", reasoning="maybe")
    prompts = [renderer.render(messages, ()).tokens for messages in ([USER], [USER, reply, USER])]
    for behind in ((), begin, (*begin, *encode("maybe")), (*begin, *encode("maybe"), *end), renderer.stop_ids[:1]):
        for prompt in (*prompts, (*begin, *prompts[0]), encode("x") * 99):
            asked = [*prompt, *behind]
            said = renderer._library.parse_response(encode("x"), prompt_ids=asked).reasoning_content
            assert renderer._parser.thinks(asked) is bool((said or "").strip())


@pytest.mark.parametrize("name", ["template", *(name for name in FORMATS if name != "llama-3")])
def test_a_call_in_a_thought_is_no_call(name: str) -> None:
    renderer = renderer_of(name, True)
    encode = renderer.tokenizer.encode
    begin, end = encode(tag_of(name, 0)), encode(tag_of(name, 1))
    prompt = renderer.render([USER], ()).tokens
    if renderer.parse(encode("x"), (), prompt=prompt).reasoning:
        begin = []
    draft, call = written(name, old="a"), written(name, old="b")
    if name == "inkling":  # a whole one ends with the tag that ends the thought
        draft = encode('edit<|content_invoke_tool_json|>{"name":"edit","args":{"old":"a"}}')
    message = read(renderer, [*begin, *encode("maybe "), *draft, *encode(" no"), *end, *call])
    assert [call.arguments for call in message.tool_calls] == [{"old": "b"}] and not message.content
    assert message.reasoning.startswith("maybe ")
    message = read(renderer, [*begin, *encode("maybe "), *draft, *encode(" no")])
    assert not message.tool_calls and not message.content and message.reasoning.startswith("maybe ")
    if name not in ("template", "gemma4", "inkling"):
        bridged = renderer.bridge(prompt, [*begin, *encode("maybe "), *draft], [USER], ())
        if bridged is not None:
            closed = renderer.decode(bridged[len(prompt) + len([*begin, *encode("maybe "), *draft]) :])
            assert closed.startswith(tag_of(name, 1)), "the thought is closed"


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("name", ["template", *FORMATS])
def test_without_tools_a_reply_is_text(name: str, thinking: bool) -> None:
    renderer = renderer_of(name, thinking)
    encode = renderer.tokenizer.encode
    prompt = renderer.render([USER], ()).tokens
    thinks = bool(renderer.parse(encode("x"), (), prompt=prompt).reasoning)
    call = written(name, old="a")
    thought = [*encode("So."), *encode(tag_of(name, 1))] if thinks else []
    tokens = [*thought, *encode("I say "), *call, *encode(" then"), renderer.stop_ids[0]]
    message = read(renderer, tokens, ())
    assert message.tool_calls == () and message.reasoning == ("So." if thinks else None)
    if name != "inkling":  # whose parts have heads of their own
        assert message.content == f"I say {renderer.decode(call)} then"
    else:
        assert message.content.startswith("I say ") and '"args":{"old":"a"}' in message.content


@pytest.mark.parametrize("name", ["template", *(name for name in FORMATS if name not in NO_TOOLS)])
def test_a_malformed_call_in_the_history_keeps_its_tool_name(name: str) -> None:
    renderer = renderer_of(name)
    id = "functions.edit:0" if name.startswith("kimi") else "call_0"
    answer = Message(role="tool", content="No.", tool_call_id=id, name="edit")
    for raw, expected in (("", {}), (" \n", {}), ('{"old": ', {"INVALID_JSON": '{"old": '})):
        malformed = ToolCall(id=id, name="edit", arguments=None, raw=raw)
        spoken = [USER, Message(role="assistant", tool_calls=(malformed,)), answer]
        made = [USER, Message(role="assistant", tool_calls=(replace(malformed, arguments=expected, raw=""),)), answer]
        assert renderer.render(spoken, [EDIT]).tokens == renderer.render(made, [EDIT]).tokens


@pytest.mark.parametrize("name", [name for name, tags in FORMAT_TAGS.items() if tags.call and name not in NO_TOOLS])
def test_a_whole_call_that_was_malformed_goes_between_the_tags_of_its_format(name: str) -> None:
    renderer = renderer_of(name)
    raw = '{"name": "edit", "arguments": {'
    said = Message(role="assistant", tool_calls=(ToolCall(id="call_0", name="edit", arguments=None, raw=raw),))
    tokens = renderer.render([USER, said], [EDIT], generation=False).tokens
    assert renderer.tokenizer.added_tokens[FORMAT_TAGS[name].call[0]] in tokens[-60:] and raw in renderer.decode(tokens)
