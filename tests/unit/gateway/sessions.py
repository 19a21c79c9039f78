"""Sessions on scripted engines, for clients to talk to."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import openai

from sparring.gateway.server import Door, open_door
from sparring.record.recorder import RecordedSession, Recorder
from sparring.render.demonstrate import reply_tokens
from sparring.testing.scripted_engine import ScriptedEngine
from sparring.testing.toy import toy_renderer, toy_task
from sparring.types import Limits, Message, Segment, ToolCall, ToolSpec

RENDERER = toy_renderer()
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
    },
}
SPEC = ToolSpec(name="add", description="Add two numbers.", parameters=ADD["function"]["parameters"])


def says(*replies: Message, renderer: Any = RENDERER) -> ScriptedEngine:
    """An engine that gives these replies, in turn."""
    left = iter(replies)
    return ScriptedEngine(lambda request: reply_tokens(renderer, next(left), [SPEC]))


def said(content: str = "", *calls: tuple[str, dict[str, Any]]) -> Message:
    tool_calls = tuple(
        ToolCall(id=f"call_{n}", name=name, arguments=arguments) for n, (name, arguments) in enumerate(calls)
    )
    return Message(role="assistant", content=content, tool_calls=tool_calls)


def opened(engine: Any, *, renderer: Any = RENDERER, **limits: Any) -> RecordedSession:
    values = {"max_turns": 20, "max_tokens": 4000, "max_tool_calls": 20, **limits}
    return Recorder(engine, renderer, max_context=3000).open(
        toy_task(), rollout_id="rl/0/0", seed=7, limits=Limits(**values)
    )


def ids_agree(session: RecordedSession, engine: ScriptedEngine) -> bool:
    """Whether each prompt that the engine saw is that of the record."""
    segments: tuple[Segment, ...] = session.segments
    seen = []
    for segment in segments:
        if segment.model is not None:
            path, at = [], segment.parent
            while at is not None:
                path.append(segments[at].tokens)
                at = segments[at].parent
            seen.append(tuple(token for tokens in reversed(path) for token in tokens))
    return sorted(seen) == sorted(request.tokens for request in engine.requests)


def through(session: Any, talk: Callable[[httpx.AsyncClient, Door], Awaitable[Any]], **settings: Any) -> Any:
    """Let a plain HTTP client talk to a session."""

    async def main() -> Any:
        async with open_door(session, **settings) as door:
            async with httpx.AsyncClient(base_url=door.url, headers={"x-api-key": door.key}, timeout=60) as client:
                return await talk(client, door)

    return asyncio.run(main())


def with_openai(session: Any, talk: Callable[[openai.AsyncOpenAI, Door], Awaitable[Any]]) -> Any:
    """Let OpenAI's client talk to a session."""

    async def main() -> Any:
        async with open_door(session) as door:
            async with openai.AsyncOpenAI(base_url=f"{door.url}/v1", api_key=door.key, max_retries=0) as client:
                return await talk(client, door)

    return asyncio.run(main())
