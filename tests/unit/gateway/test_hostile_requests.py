"""Requests of any shape: each is answered, or refused in its vendor's shape before anything is sampled; none is a
fault of the server."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from suite import short_of

from sparring.errors import BadInput
from sparring.gateway.dialects.chat_completions import ChatCompletions
from sparring.gateway.dialects.dialect import ClientCall, ClientRequest, Dialect
from sparring.gateway.dialects.fields import body_of, to_json
from sparring.gateway.dialects.gemini import Gemini
from sparring.gateway.dialects.messages import Messages
from sparring.gateway.dialects.responses import Responses

SCHEMA = {"type": "object", "properties": {"a": {"type": "number"}}}
FUNCTION = {"name": "add", "description": "Add.", "parameters": SCHEMA}
PATCHED = {"id": "call_0_1", "type": "custom", "custom": {"name": "patch", "input": "x"}}
CALL = {"id": "call_0_0", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
FREEFORM = {"name": "patch", "format": {"type": "grammar", "grammar": {"syntax": "lark", "definition": "x"}}}
CHAT = {
    "model": "policy",
    "messages": [
        {"role": "developer", "content": [{"type": "text", "text": "Be brief."}]},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [CALL, PATCHED]},
        {"role": "tool", "tool_call_id": "call_0_0", "content": [{"type": "text", "text": "3"}]},
        {"role": "tool", "tool_call_id": "call_0_1", "content": "4"},
    ],
    "tools": [{"type": "function", "function": FUNCTION}, {"type": "custom", "custom": FREEFORM}],
    "tool_choice": {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "auto", "tools": [{"type": "custom", "custom": {"name": "patch"}}]},
    },
    "stream_options": {"include_usage": True},
    "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}},
    "stop": ["x"],
    "n": 1,
    "max_tokens": 5,
}
CUSTOM = {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark", "definition": "x"}}
RESPONSE = {
    "model": "policy",
    "instructions": "Be brief.",
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "function_call", "call_id": "call_0_0", "name": "spawn", "namespace": "agents", "arguments": "{}"},
        {"type": "custom_tool_call", "call_id": "call_0_1", "name": "patch", "input": "x"},
        {"type": "function_call_output", "call_id": "call_0_0", "output": [{"type": "input_text", "text": "3"}]},
        {"type": "custom_tool_call_output", "call_id": "call_0_1", "output": "4"},
    ],
    "tools": [
        {"type": "function", **FUNCTION},
        CUSTOM,
        {"type": "namespace", "name": "agents", "tools": [{"type": "function", "name": "spawn", "parameters": SCHEMA}]},
    ],
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "custom", "name": "patch"}]},
    "include": ["reasoning.encrypted_content"],
    "text": {"format": {"type": "json_schema", "name": "s", "schema": SCHEMA}, "verbosity": "low"},
    "max_output_tokens": 5,
}
LATER = {"name": "later", "input_schema": SCHEMA, "defer_loading": True}
MESSAGE = {
    "model": "policy",
    "max_tokens": 5,
    "system": [{"type": "text", "text": "Be brief."}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                {"type": "tool_use", "id": "call_0_0", "name": "add", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "call_0_0",
                    "content": [{"type": "tool_reference", "tool_name": "later"}],
                },
            ],
        },
    ],
    "tools": [{"name": "add", "input_schema": SCHEMA}, LATER],
    "tool_choice": {"type": "auto"},
    "stop_sequences": ["x"],
    "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}},
}
CONTENT = {
    "systemInstruction": {"parts": [{"text": "Be brief."}]},
    "contents": [
        {"role": "user", "parts": [{"text": "Hi"}]},
        {"role": "model", "parts": [{"text": "Hm.", "thought": True}, {"functionCall": {"name": "add", "args": {}}}]},
        {"role": "user", "parts": [{"functionResponse": {"name": "add", "response": {"output": "3"}}}]},
    ],
    "tools": [{"functionDeclarations": [{"name": "add", "parameters": {"type": "OBJECT", "properties": {}}}]}],
    "toolConfig": {"functionCallingConfig": {"mode": "VALIDATED", "allowedFunctionNames": ["add"]}},
    "generationConfig": {
        "maxOutputTokens": 5,
        "stopSequences": ["x"],
        "responseMimeType": "application/json",
        "responseSchema": {"type": "OBJECT", "properties": {"a": {"type": "NUMBER", "nullable": True}}},
    },
}
REQUESTS: dict[str, tuple[Dialect, dict[str, Any]]] = {
    "chat": (ChatCompletions(), CHAT),
    "responses": (Responses(), RESPONSE),
    "messages": (Messages(), MESSAGE),
    "gemini": (Gemini(), CONTENT),
}

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=4,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return where everything in a request stands."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, inner in pairs for place in places(inner, (*path, key)))]


def changed(body: dict[str, Any], place: tuple[Any, ...], value: Any, remove: bool) -> dict[str, Any]:
    """Return a request with one thing replaced or taken out."""
    body = copy.deepcopy(body)
    inner: Any = body
    for key in place[:-1]:
        inner = inner[key]
    if remove:
        del inner[place[-1]]
    else:
        inner[place[-1]] = value
    return body


def read(dialect: Dialect, body: dict[str, Any]) -> ClientRequest | None:
    """Read a request as the server does; None where it is refused. Every other error fails the test."""
    try:
        request = dialect.read(ClientCall(body=body_of(to_json(body)), path={"model": "policy"}))
    except BadInput:
        return None
    assert request.messages and request.messages[-1].role != "assistant"
    for message in request.messages:
        assert isinstance(message.content, str) and isinstance(message.reasoning, str | None)
        assert all(isinstance(call.name, str) and isinstance(call.id, str) for call in message.tool_calls)
    for tool in request.tools:
        assert isinstance(tool.description, str) and isinstance(tool.parameters, dict)
    return request


@pytest.mark.parametrize("name", REQUESTS)
def test_the_unchanged_requests_are_read(name: str) -> None:
    assert read(*REQUESTS[name]) is not None


@pytest.mark.parametrize("name", short_of(REQUESTS, ["chat", "messages"]))
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(data=st.data())
def test_a_changed_request_is_read_or_refused(name: str, data: st.DataObject) -> None:
    dialect, body = REQUESTS[name]
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.sampled_from(places(body)[1:] or [("model",)]))
        body = changed(body, place, data.draw(ANYTHING), data.draw(st.booleans()) and place in places(body))
    read(dialect, body)


@pytest.mark.parametrize("name", REQUESTS)
@pytest.mark.parametrize("value", [None, True, 3, 0.5, "x", "", [], [3], [[]], {}, {"a": 1}, {"type": {}}])
def test_a_value_of_another_type_in_any_place_is_read_or_refused(name: str, value: Any) -> None:
    dialect, body = REQUESTS[name]
    for place in places(body)[1:]:
        read(dialect, changed(body, place, value, False))
