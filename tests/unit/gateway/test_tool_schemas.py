"""Tools without a schema: a chat function takes none, as the vendor's schema has it; a Messages tool must name one."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
from sessions import opened, said, says

from sparring.gateway.server import open_door

HI = [{"role": "user", "content": "Hi"}]


def posted(path: str, body: dict[str, Any]) -> tuple[httpx.Response, int]:
    """Post a request; return the answer and the number of prompts that the engine was given."""
    engine = says(said("A"))

    async def main() -> httpx.Response:
        async with open_door(opened(engine)) as door, httpx.AsyncClient(base_url=door.url) as client:
            return await client.post(path, json=body, headers={"authorization": f"Bearer {door.key}"})

    return asyncio.run(main()), len(engine.requests)


def test_a_chat_function_without_parameters_has_no_arguments() -> None:
    tools = [{"type": "function", "function": {"name": "now"}}]
    answer, requests = posted("/v1/chat/completions", {"model": "policy", "messages": HI, "tools": tools})
    assert (answer.status_code, requests) == (200, 1), answer.text
    assert answer.json()["choices"][0]["message"]["content"] == "A"


def test_a_messages_tool_without_a_schema_is_refused_before_anything_is_sampled() -> None:
    body = {"model": "policy", "max_tokens": 9, "messages": HI, "tools": [{"name": "now"}]}
    answer, requests = posted("/v1/messages", body)
    assert (answer.status_code, requests) == (400, 0)
    assert "tools[0].input_schema: expected a JSON schema" in answer.json()["error"]["message"]
