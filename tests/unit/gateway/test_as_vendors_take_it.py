"""Requests that are no edit and no mistake: clients send them, and their vendors take them."""

from __future__ import annotations

import gzip
import json
from typing import Any

import httpx
import pytest
from sessions import RENDERER, ids_agree, opened, said, says, through

from sparring.gateway.server import Door
from sparring.types import Message

CHAT, RESPONSES, GEMINI = "/v1/chat/completions", "/v1/responses", "/v1beta/models/policy:generateContent"
USER: dict[str, Any] = {"role": "user", "content": "Hi"}
FUNCTION = {"name": "now", "description": None, "parameters": None}


def answers(session: Any, *requests: tuple[str, Any]) -> list[httpx.Response]:
    """The answers to requests, one after the other; a body of bytes is sent as it is."""

    async def talk(client: httpx.AsyncClient, door: Door) -> list[httpx.Response]:
        return [
            await client.post(door.url + path, content=body if isinstance(body, bytes) else json.dumps(body))
            for path, body in requests
        ]

    return list(through(session, talk))


@pytest.mark.parametrize(("path", "field"), [(CHAT, "messages"), (RESPONSES, "input")])
def test_a_conversation_that_ends_with_a_reply_gets_another_reply(path: str, field: str) -> None:
    text = "This is all that I have to say."
    engine = says(said(text), said("Well."), said("Bye."))
    session = opened(engine)
    told = [USER, {"role": "assistant", "content": text}]
    further = [*told, {"role": "assistant", "content": "Well."}, USER]
    asked = [(path, {"model": "policy", field: history}) for history in ([USER], told, further)]
    seen = answers(session, *asked)
    assert [answer.status_code for answer in seen] == [200] * 3 and "Well." in seen[1].text
    assert RENDERER.decode(engine.requests[1].tokens).count(f"{text}<|im_end|>") == 1
    segments = session.segments
    assert [segment.label for segment in segments if segment.model] == ["agent"] * 3
    assert [segment.parent for segment in segments] == [None, 0, None, 2, 3, 4] and ids_agree(session, engine)
    assert segments[2].fork is not None and (segments[2].fork.reason, segments[2].fork.of) == ("template", 1)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [USER], "tools": [{"type": "function", "function": FUNCTION}]}),
        (CHAT, {"messages": [USER], "tools": [{"type": "function", "function": {"name": "now"}}]}),
        (CHAT, {"messages": [USER], "response_format": {"type": "json_schema", "json_schema": {"schema": None}}}),
        (RESPONSES, {"input": [USER], "tools": [{"type": "function", **FUNCTION}]}),
        (RESPONSES, {"input": [USER], "tools": [{"type": "function", "name": "now"}]}),
        (GEMINI, {"contents": [{"role": None, "parts": [{"text": "Hi", "functionCall": None}]}], "tools": None}),
        (GEMINI, {"contents": {"parts": [{"text": "Hi"}]}, "tools": [{"functionDeclarations": [FUNCTION]}]}),
    ],
)
def test_null_fields_count_as_missing(path: str, body: dict[str, Any]) -> None:
    engine = says(said("Noon."))
    (answer,) = answers(opened(engine), (path, {"model": "policy", **body}))
    assert answer.status_code == 200, answer.text
    assert ('"parameters": {"type": "object", "properties": {}}' in RENDERER.decode(engine.requests[0].tokens)) == (
        bool(body.get("tools"))
    )


def test_gemini_accepts_both_spellings_of_nested_fields() -> None:
    own = {"type": "OBJECT", "properties": {"my_name": {"any_of": [{"type": "STRING", "max_length": "3"}]}}}
    body = {
        "system_instruction": {"parts": [{"text": "Be brief."}]},
        "contents": [
            {"parts": [{"text": "Hi"}]},
            {"role": "model", "parts": [{"function_call": {"name": "f", "args": {"my_name": "a"}}}]},
            {"parts": [{"function_response": {"name": "f", "response": {"my_result": 1}}}]},
        ],
        "tools": [{"function_declarations": [{"name": "f", "parameters": own}]}],
        "tool_config": {"function_calling_config": {"mode": "NONE"}},
        "generation_config": {"max_output_tokens": 2, "stop_sequences": ["!"], "top_k": 4, "thinking_config": {}},
    }
    engine = says(said("One two three four."))
    session = opened(engine)
    (answer,) = answers(session, (GEMINI, body))
    assert answer.status_code == 200, answer.text
    assert answer.json()["candidates"][0]["finishReason"] == "MAX_TOKENS"
    assert answer.headers["x-sparring-noted"] == "generationConfig.thinkingConfig, generationConfig.topK"
    assert session.segments[1].evidence.wishes["generationConfig.topK"] == 4
    prompt = RENDERER.decode(engine.requests[0].tokens)
    schema = '{"type": "object", "properties": {"my_name": {"anyOf": [{"type": "string", "maxLength": 3}]}}}'
    assert all(text in prompt for text in (schema, '"arguments": {"my_name": "a"}', '{"my_result": 1}'))
    assert engine.requests[0].sampling.stop_strings == ("!",)


def test_fields_of_servers_of_open_models_are_noted() -> None:
    wishes = {"top_k": 20, "min_p": 0.1, "repetition_penalty": 1.05, "chat_template_kwargs": {"enable_thinking": False}}
    session = opened(says(said("Yes.")))
    (answer,) = answers(session, (CHAT, {"model": "policy", "messages": [USER], **wishes}))
    assert set(answer.headers["x-sparring-noted"].split(", ")) == wishes.keys()
    assert session.segments[1].evidence.wishes == wishes


def test_the_length_of_a_far_too_long_text_is_a_lower_bound() -> None:
    long = [{"role": "user", "content": "again " * length} for length in (3500, 40_000)]
    exact, far = answers(opened(says()), *((CHAT, {"model": "policy", "messages": [each]}) for each in long))
    count = RENDERER.render([Message(**long[0])], ()).tokens
    assert f"your messages resulted in {len(count)} tokens" in exact.json()["error"]["message"]
    assert "your messages resulted in more than 6000 tokens" in far.json()["error"]["message"]


def test_compressed_bodies_and_double_slashes_are_refused_with_the_reason() -> None:
    body = {"model": "policy", "messages": [USER]}
    packed, doubled = answers(opened(says()), (CHAT, gzip.compress(json.dumps(body).encode())), (f"/{CHAT}", body))
    assert "content-encoding: expected a body" in packed.json()["error"]["message"]
    assert "end the client's base URL without a slash" in doubled.json()["error"]["message"]
