"""Without tools, or where a client forbids calls, what a reply says is text as it was written, in every dialect, whole
and streamed; a call that names no tool is text everywhere."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from sessions import ADD, RENDERER, ids_agree, opened

from sparring.gateway.server import open_door
from sparring.testing.scripted_engine import ScriptedEngine

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
TEXTS = (f"Use {CALL} like this.", "garbage <tool_call> more garbage", CALL)
NAMELESS = "garbage <tool_call> more garbage"
FUNCTION = ADD["function"]
GEMINI = "/v1beta/models/policy"
USER = [{"role": "user", "content": "Explain."}]
PARTS = [{"role": "user", "parts": [{"text": "Explain."}]}]
ASKED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", "/v1/chat/completions", {"model": "policy", "messages": USER}),
    "responses": ("/v1/responses", "/v1/responses", {"model": "policy", "input": USER}),
    "messages": ("/v1/messages", "/v1/messages", {"model": "policy", "max_tokens": 99, "messages": USER}),
    "gemini": (f"{GEMINI}:generateContent", f"{GEMINI}:streamGenerateContent?alt=sse", {"contents": PARTS}),
}
TOOLS: dict[str, dict[str, Any]] = {
    "chat": {"tools": [ADD]},
    "responses": {"tools": [{"type": "function", **FUNCTION}]},
    "messages": {"tools": [{"name": "add", "input_schema": FUNCTION["parameters"]}]},
    "gemini": {"tools": [{"functionDeclarations": [FUNCTION]}]},
}
NONE: dict[str, dict[str, Any]] = {
    "chat": {"tool_choice": "none"},
    "responses": {"tool_choice": "none"},
    "messages": {"tool_choice": {"type": "none"}},
    "gemini": {"toolConfig": {"functionCallingConfig": {"mode": "NONE"}}},
}


def whole(answer: dict[str, Any]) -> tuple[str, int, str]:
    """The text of an answer, the number of its calls, and why it ended."""
    if "choices" in answer:
        choice = answer["choices"][0]
        message = choice["message"]
        return message["content"] or "", len(message.get("tool_calls") or ()), choice["finish_reason"]
    if "output" in answer:
        items = [item for item in answer["output"] if item["type"] == "message"]
        text = "".join(part["text"] for item in items for part in item["content"])
        return text, len(answer["output"]) - len(items), {"completed": "stop"}[answer["status"]]
    if "candidates" in answer:
        (candidate,) = answer["candidates"]
        parts = candidate["content"]["parts"]
        text = "".join(part.get("text", "") for part in parts)
        return text, sum("functionCall" in part for part in parts), candidate["finishReason"].lower()
    texts = [block["text"] for block in answer["content"] if block["type"] == "text"]
    return "".join(texts), len(answer["content"]) - len(texts), answer["stop_reason"].replace("end_turn", "stop")


def streamed(body: str) -> tuple[str, int, str]:
    """The same of an answer's events."""
    events = [json.loads(line[6:]) for line in body.splitlines() if line.startswith("data: {")]
    if "candidates" in events[-1]:
        parts = [part for event in events if event for part in event["candidates"][0]["content"]["parts"]]
        last = events[-1]["candidates"][0]
        return whole({"candidates": [{**last, "content": {"parts": parts}}]})
    if events[0].get("type") == "response.created":
        return whole(events[-1]["response"])
    if events[0].get("type") == "message_start":
        texts = [e["delta"]["text"] for e in events if e.get("delta", {}).get("type") == "text_delta"]
        calls = sum(e.get("content_block", {}).get("type") == "tool_use" for e in events)
        reason = next(e["delta"]["stop_reason"] for e in events if e["type"] == "message_delta")
        return "".join(texts), calls, reason.replace("end_turn", "stop")
    choices = [event["choices"][0] for event in events]
    calls = sum(len(choice["delta"].get("tool_calls") or ()) for choice in choices)
    return "".join(choice["delta"].get("content") or "" for choice in choices), calls, choices[-1]["finish_reason"]


def shown(dialect: str, text: str, *additions: dict[str, Any]) -> tuple[list[tuple[str, int, str]], Any, Any]:
    """What a client reads of a reply, whole and streamed, for each addition to its request; session and engine."""
    path, streaming, body = ASKED[dialect]
    engine = ScriptedEngine(lambda request: tuple(RENDERER.tokenizer.encode(text)))
    session = opened(engine)

    async def main() -> list[tuple[str, int, str]]:
        seen = []
        async with open_door(session) as door, httpx.AsyncClient(base_url=door.url) as client:
            client.headers["authorization"] = f"Bearer {door.key}"
            for addition in additions:
                answer = await client.post(path, json={**body, **addition})
                seen.append(whole(answer.json()))
                switch = {} if dialect == "gemini" else {"stream": True}
                answer = await client.post(streaming, json={**body, **addition, **switch})
                seen.append(streamed(answer.text))
        return seen

    return asyncio.run(main()), session, engine


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("dialect", ASKED)
def test_a_reply_without_tools_is_text(dialect: str, text: str) -> None:
    seen, session, engine = shown(dialect, text, {}, {**TOOLS[dialect], **NONE[dialect]})
    assert seen == [(text, 0, "stop")] * 4
    assert all(s.message.content == text and not s.message.tool_calls for s in session.segments if s.model)
    assert ids_agree(session, engine)


@pytest.mark.parametrize("dialect", ASKED)
def test_a_turn_without_calls_continues_the_branch(dialect: str) -> None:
    _, session, engine = shown(dialect, "Yes.", TOOLS[dialect], {**TOOLS[dialect], **NONE[dialect]})
    assert [segment.parent for segment in session.segments] == [None, 0, 0, 0, 0]
    assert ids_agree(session, engine)


@pytest.mark.parametrize("dialect", ASKED)
def test_a_call_that_names_no_tool_is_shown_as_text(dialect: str) -> None:
    seen, session, _ = shown(dialect, NAMELESS, TOOLS[dialect])
    assert seen == [("garbagemore garbage", 0, "stop")] * 2
    assert [call.raw for call in session.segments[1].message.tool_calls] == ["more garbage"]
