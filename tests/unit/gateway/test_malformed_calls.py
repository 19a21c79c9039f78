"""A call that does not parse is sent back as it was shown, in every dialect: that is the same reply, and no branch."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from sessions import ADD, RENDERER, ids_agree, opened, said

from sparring.gateway.server import open_door
from sparring.render.demonstrate import reply_tokens
from sparring.testing.scripted_engine import ScriptedEngine

FUNCTION = ADD["function"]
BROKEN = '<tool_call>\n{"name": "add", "arguments": {"a": 1,}\n</tool_call>'
NAMELESS = '<tool_call>\n{"arguments": {"a": 1}}\n</tool_call>'
WHOLE = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
REPLIES = [
    BROKEN,
    f"I add.\n{BROKEN}",
    f"{BROKEN}\n{BROKEN}",
    f"I add.\n{NAMELESS}\n{WHOLE}",
    f"{WHOLE}\n{BROKEN}",
    f"I add.\n{NAMELESS}\n{BROKEN}",
    "I add.\n" + BROKEN.removesuffix("</tool_call>"),
]


def messages_turn(history: list[Any]) -> tuple[str, dict[str, Any]]:
    tools = [{"name": "add", "input_schema": FUNCTION["parameters"]}]
    body = {"model": "policy", "max_tokens": 200, "messages": history or [{"role": "user", "content": "Hi"}]}
    return "/v1/messages", {**body, "tools": tools}


def messages_next(answer: dict[str, Any]) -> list[Any]:
    results = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": "3"}
        for block in answer["content"]
        if block["type"] == "tool_use"
    ]
    return [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": answer["content"]},
        {"role": "user", "content": results or "That does not parse."},
    ]


def gemini_turn(history: list[Any]) -> tuple[str, dict[str, Any]]:
    body = {"contents": history or [{"role": "user", "parts": [{"text": "Hi"}]}]}
    return "/v1beta/models/policy:generateContent", {**body, "tools": [{"functionDeclarations": [FUNCTION]}]}


def gemini_next(answer: dict[str, Any]) -> list[Any]:
    reply = answer["candidates"][0]["content"]
    results = [
        {"functionResponse": {"id": call["id"], "name": call["name"], "response": {"output": "3"}}}
        for call in (part["functionCall"] for part in reply["parts"] if "functionCall" in part)
    ]
    return [
        {"role": "user", "parts": [{"text": "Hi"}]},
        reply,
        {"role": "user", "parts": results or [{"text": "That does not parse."}]},
    ]


def chat_turn(history: list[Any]) -> tuple[str, dict[str, Any]]:
    body = {"model": "policy", "messages": history or [{"role": "user", "content": "Hi"}], "tools": [ADD]}
    return "/v1/chat/completions", body


def chat_next(answer: dict[str, Any]) -> list[Any]:
    reply = answer["choices"][0]["message"]
    answers = [{"role": "tool", "tool_call_id": call["id"], "content": "3"} for call in reply["tool_calls"]]
    return [{"role": "user", "content": "Hi"}, reply, *answers]


def responses_turn(history: list[Any]) -> tuple[str, dict[str, Any]]:
    body = {"model": "policy", "input": history or [{"role": "user", "content": "Hi"}]}
    return "/v1/responses", {**body, "tools": [{"type": "function", **FUNCTION}]}


def responses_next(answer: dict[str, Any]) -> list[Any]:
    outputs = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "3"}
        for item in answer["output"]
        if item["type"] == "function_call"
    ]
    return [{"role": "user", "content": "Hi"}, *answer["output"], *outputs]


DIALECTS = {
    "messages": (messages_turn, messages_next),
    "gemini": (gemini_turn, gemini_next),
    "chat": (chat_turn, chat_next),
    "responses": (responses_turn, responses_next),
}


@pytest.mark.parametrize("reply", REPLIES)
@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_malformed_call_comes_back_as_it_was_shown(dialect: str, reply: str) -> None:
    turn, following = DIALECTS[dialect]
    tokens = [tuple(RENDERER.tokenizer.encode(reply + "<|im_end|>")), reply_tokens(RENDERER, said("Bye."))]
    script = iter(tokens)
    engine = ScriptedEngine(lambda request: next(script))
    session = opened(engine)

    async def main() -> None:
        async with open_door(session) as door, httpx.AsyncClient(base_url=door.url) as client:
            client.headers["authorization"] = f"Bearer {door.key}"
            path, body = turn([])
            first = await client.post(path, json=body)
            assert first.status_code == 200, first.text
            path, body = turn(following(json.loads(first.text)))
            second = await client.post(path, json=body)
            assert second.status_code == 200, second.text

    asyncio.run(main())
    assert any(call.arguments is None for call in session.segments[1].message.tool_calls)
    assert [segment.parent for segment in session.segments] == [None, 0, 1, 2] and ids_agree(session, engine)


def shown_in(answer: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return names and arguments of the calls of an answer."""
    if "content" in answer:
        return [(block["name"], block["input"]) for block in answer["content"] if block["type"] == "tool_use"]
    if "candidates" in answer:
        parts = answer["candidates"][0]["content"]["parts"]
        return [(p["functionCall"]["name"], p["functionCall"]["args"]) for p in parts if "functionCall" in p]
    if "choices" in answer:
        calls = [call["function"] for call in answer["choices"][0]["message"]["tool_calls"]]
    else:
        calls = [item for item in answer["output"] if item["type"] == "function_call"]
    return [(call["name"], call["arguments"]) for call in calls]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_malformed_call_is_shown_with_its_name_and_what_was_written(dialect: str) -> None:
    turn, _ = DIALECTS[dialect]
    tokens = tuple(RENDERER.tokenizer.encode(f"I add.\n{BROKEN}<|im_end|>"))
    session = opened(ScriptedEngine(lambda request: tokens))

    async def main() -> dict[str, Any]:
        async with open_door(session) as door, httpx.AsyncClient(base_url=door.url) as client:
            client.headers["authorization"] = f"Bearer {door.key}"
            path, body = turn([])
            return (await client.post(path, json=body)).json()

    answer = asyncio.run(main())
    written = '{"name": "add", "arguments": {"a": 1,}'
    text = dialect in ("chat", "responses")
    assert shown_in(answer) == [("add", written if text else {"INVALID_JSON": written})]
    if dialect == "messages":
        assert answer["stop_reason"] == "tool_use", "its client answers it"
