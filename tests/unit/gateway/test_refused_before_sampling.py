"""What no model can answer is refused in its vendor's own shape, in every dialect, before anything is sampled."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from sessions import opened, said, says

from sparring.gateway.server import open_door

Request = tuple[str, dict[str, Any]]
USER = {"role": "user", "content": "Hi"}
REPLY = {"role": "assistant", "content": "x"}
ROBOT = {"role": "robot", "content": "x"}
PARTS = {"role": "user", "parts": [{"text": "Hi"}]}
OUTPUT = {"type": "function_call_output", "call_id": "z", "output": "1"}
RESULT = {"type": "tool_result", "tool_use_id": "z", "content": "1"}


def chat(**fields: Any) -> Request:
    return "/v1/chat/completions", {"model": "policy", "messages": [USER], **fields}


def responses(**fields: Any) -> Request:
    return "/v1/responses", {"model": "policy", "input": "Hi", **fields}


def messages(**fields: Any) -> Request:
    return "/v1/messages", {"model": "policy", "max_tokens": 5, "messages": [USER], **fields}


def gemini(**fields: Any) -> Request:
    return "/v1beta/models/policy:generateContent", {"contents": [PARTS], **fields}


MALFORMED = {
    "a tool without a schema": (
        "expected a",
        chat(tools=[{"type": "function", "function": {"name": "a", "parameters": 3}}]),
        responses(tools=[{"type": "function", "name": "a", "parameters": "x"}]),
        messages(tools=[{"name": "a"}]),
        gemini(tools=[{"functionDeclarations": [{"name": "a", "parameters": 3}]}]),
    ),
    "an unknown role": (
        "'robot'",
        chat(messages=[ROBOT]),
        responses(input=[ROBOT]),
        messages(messages=[ROBOT]),
        gemini(contents=[{**PARTS, "role": "robot"}]),
    ),
    "a reply at the end": (
        "expected a message to reply to at the end",
        messages(messages=[USER, REPLY]),
        gemini(contents=[PARTS, {**PARTS, "role": "model"}]),
    ),
    "an answer without its call": (
        "expected an answer to a call of the reply before it",
        chat(messages=[USER, {"role": "tool", "tool_call_id": "z", "content": "1"}]),
        responses(input=[USER, OUTPUT]),
        messages(messages=[{"role": "user", "content": [RESULT]}]),
        gemini(contents=[{"role": "user", "parts": [{"functionResponse": {"name": "a", "response": {}}}]}]),
    ),
}
BYTES: dict[str, tuple[str, Callable[[dict[str, Any]], bytes]]] = {
    "NaN": ("got NaN", lambda body: json.dumps({**body, "temperature": float("nan")}).encode()),
    "a number beyond a double": ("got 1e999", lambda body: json.dumps(body)[:-1].encode() + b', "temperature": 1e999}'),
    "half a surrogate pair": ("half of a surrogate", lambda body: json.dumps(body).replace("Hi", "\\ud800").encode()),
    "no UTF-8": ("expected a JSON object in UTF-8", lambda body: json.dumps(body).encode().replace(b"Hi", b"\xff")),
    "no JSON": ("expected a JSON object in UTF-8", lambda body: json.dumps(body).encode()[:-1]),
}
CASES = [
    (name, text, path, json.dumps(body).encode())
    for name, (text, *requests) in MALFORMED.items()
    for path, body in requests
]
CASES += [
    (name, text, path, written(body))
    for name, (text, written) in BYTES.items()
    for path, body in (chat(), responses(), messages(), gemini())
]


def shape(path: str, answer: dict[str, Any]) -> str:
    """Check that an error has the shape of the vendor, and return its message."""
    error = answer["error"]
    if path.endswith("messages"):
        assert answer["type"] == "error" and error["type"] == "invalid_request_error"
    elif path.endswith("generateContent"):
        assert error["code"] == 400 and error["status"] == "INVALID_ARGUMENT"
    else:
        assert error["type"] == "invalid_request_error" and "code" in error and "param" in error
    return str(error["message"])


@pytest.mark.parametrize("streams", [False, True])
def test_bad_input_gets_the_vendors_error_before_sampling(streams: bool) -> None:
    engine = says(said("A"))
    session = opened(engine)

    async def main() -> list[httpx.Response]:
        async with open_door(session) as door, httpx.AsyncClient(base_url=door.url, timeout=60) as client:
            client.headers["authorization"] = f"Bearer {door.key}"
            answers = []
            for _, _, path, content in CASES:
                if streams and path.endswith(":generateContent"):
                    path = path.replace(":generateContent", ":streamGenerateContent")
                elif streams:
                    content = content.replace(b"{", b'{"stream": true, ', 1)
                answers.append(await client.post(path, content=content))
            return answers

    for (name, text, path, _), answer in zip(CASES, asyncio.run(main()), strict=True):
        assert answer.status_code == 400, (name, path, answer.text)
        assert text in shape(path, answer.json()), (name, path, answer.text)
    assert not engine.requests and not session.segments
