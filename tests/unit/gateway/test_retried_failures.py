"""Requests that are sent again by a vendor's client because the engine failed."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
from sessions import RENDERER, SPEC, opened, said

from sparring.errors import EngineError
from sparring.gateway.server import open_door
from sparring.render.demonstrate import reply_tokens
from sparring.testing.scripted_engine import ScriptedEngine


def test_a_retry_of_a_failed_request_does_not_join_an_earlier_equal_one() -> None:
    """Three samples of one prompt, one after the other; the engine fails once, at the second."""
    replies, asked = iter(("first", "second", "third")), []

    def script(request: Any) -> Any:
        asked.append(request)
        if len(asked) == 2:
            raise EngineError("down")
        return reply_tokens(RENDERER, said(next(replies)), [SPEC])

    session = opened(ScriptedEngine(script))

    async def play() -> list[str | None]:
        async with (
            open_door(session) as door,
            openai.AsyncOpenAI(base_url=f"{door.url}/v1", api_key=door.key) as client,
        ):
            messages: Any = [{"role": "user", "content": "One of many."}]
            answers = [await client.chat.completions.create(model="policy", messages=messages) for _ in range(3)]
            return [answer.choices[0].message.content for answer in answers]

    assert asyncio.run(play()) == ["first", "second", "third"]
    assert session.usage.turns == 3
    seeds = [request.sampling.seed for request in asked]
    assert seeds[1] == seeds[2], "asked again, it is the same turn, with the same random numbers"
    assert len(set(seeds)) == 3
