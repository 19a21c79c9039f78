"""Replies that have to call a tool: every walk through the grammar is a reply that parses to such calls."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from sparring.errors import BadInput
from sparring.generation import Constraint, GenerateRequest, Sampling
from sparring.render.demonstrate import reply_tokens
from sparring.testing.toy import toy_renderer
from sparring.types import Message, ToolCall, ToolSpec

LOOK = ToolSpec(
    name="look",
    description="Look.",
    parameters={
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "properties": {"at": {"type": "string", "maxLength": 9}, "near": {"$ref": "#/$defs/near"}},
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
OTHER = ToolSpec(name="other", description="Another.", parameters={"type": "object", "properties": {}})
TOOLS = (LOOK, LOOK_UP, OTHER)
QUESTION = Message(role="user", content="?")


def constraint(*tools: ToolSpec, parallel: bool = True) -> Constraint:
    listed = [{"name": tool.name, "parameters": tool.parameters} for tool in tools]
    return Constraint(kind="tool_call", source=json.dumps({"tools": listed, "parallel": parallel}))


def rule(renderer: Any, held: Constraint) -> Any:
    request = GenerateRequest(id="r", tokens=(1,), sampling=Sampling(constraint=held, stop=renderer.stop_ids))
    return renderer.bind(request).allowed


def ids(allowed: bytes) -> list[int]:
    number = int.from_bytes(allowed, "little")
    return [token for token in range(8 * len(allowed)) if number >> token & 1]


def walk(renderer: Any, allowed: Any, draw: random.Random) -> list[int]:
    """Sample a reply: any token that may follow; tags that end something are drawn more often."""
    tokens: list[int] = []
    tags = set(renderer.control_ids.values())
    while not tokens or tokens[-1] not in renderer.stop_ids:
        following = ids(allowed(tokens))
        ends = [token for token in following if token in tags]
        tokens.append(draw.choice(ends if ends and draw.random() < 0.4 else following))
        assert len(tokens) < 2000
    return tokens


def valid(call: ToolCall) -> bool:
    arguments = call.arguments
    if arguments is None:
        return False
    if call.name == "look":
        text = isinstance(arguments["at"], str) and len(arguments["at"]) <= 9
        return text and arguments.keys() <= {"at", "near"} and isinstance(arguments.get("near", True), bool)
    return (
        call.name == "look_up"
        and arguments.keys() == {"word"}
        and arguments["word"] in ("<tool_call>", "</tool_call>", "é")
    )


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("parallel", [False, True])
def test_every_walk_is_a_reply_of_calls(thinking: bool, parallel: bool) -> None:
    renderer = toy_renderer(thinking=thinking)
    prompt = renderer.render([QUESTION], TOOLS).tokens
    allowed, draw = rule(renderer, constraint(LOOK, LOOK_UP, parallel=parallel)), random.Random(7)
    seen: set[Any] = set()
    for _ in range(60):
        reply = renderer.parse(walk(renderer, allowed, draw), TOOLS, prompt=prompt)
        assert reply.content == "" and all(map(valid, reply.tool_calls)), reply
        seen |= {("thought", bool(reply.reasoning)), *(call.name for call in reply.tool_calls)}
        seen.add(min(len(reply.tool_calls), 2))
    assert {"look", "look_up", 1} <= seen and 0 not in seen and "other" not in seen
    assert (2 in seen) == parallel and (("thought", True) in seen) == thinking


@pytest.mark.parametrize("thinking", [False, True])
def test_what_the_format_itself_writes_is_allowed_and_text_is_not(thinking: bool) -> None:
    renderer = toy_renderer(thinking=thinking)
    allowed = rule(renderer, constraint(LOOK, LOOK_UP))
    tricky = ToolCall(id="call_0", name="look", arguments={"at": '"<b>\n', "near": True})
    calls = (tricky, ToolCall(id="call_1", name="look_up", arguments={"word": "é"}))
    for reasoning in (None, "So: \n\n it <b>is.") if thinking else (None,):
        tokens = reply_tokens(renderer, Message(role="assistant", tool_calls=calls, reasoning=reasoning), TOOLS)
        for at, token in enumerate(tokens):
            assert token in ids(allowed(tokens[:at])), renderer.decode(tokens[:at])
    assert not set(ids(allowed([]))) & set(renderer.stop_ids)
    with pytest.raises(ValueError, match="expected tokens that it allows"):
        allowed(renderer.tokenizer.encode("Hello"))
    within = reply_tokens(renderer, Message(role="assistant", tool_calls=(tricky,)), TOOLS)
    inside = within[: len(within) // 2]
    tags = set(renderer.control_ids.values())
    assert not set(ids(allowed(inside))) & tags, "no tag within the arguments"


@pytest.mark.parametrize(
    ("held", "message"),
    [
        (constraint(), "a tool to call, got none"),
        (constraint(ToolSpec(name='a"b', description="", parameters={})), "tools with plain names"),
        (constraint(ToolSpec(name="a", description="", parameters={"properties": {"b": {"type": "no"}}})), "compiles"),
        (Constraint(kind="tool_call", source="{}"), "compiles"),
    ],
)
def test_what_cannot_be_called_is_refused(held: Constraint, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        rule(toy_renderer(), held)


def test_a_format_whose_calls_cannot_be_proven_is_refused_by_name() -> None:
    with pytest.raises(BadInput, match="tool call: expected a format whose calls are JSON .*, got 'template'"):
        rule(toy_renderer(name="template"), constraint(LOOK))
