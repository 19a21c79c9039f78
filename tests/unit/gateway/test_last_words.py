"""What a program has to say in the end: the main agent's last reply that called nothing."""

from __future__ import annotations

import asyncio

import httpx
from sessions import ADD, opened, said, says

from sparring.gateway.server import open_door


def test_the_last_words_exclude_titles_sub_agents_and_calls() -> None:
    replies = (said("The answer is 42."), said("A title"), said("I am another agent."), said("", ("add", {"a": 1})))
    session = opened(says(*replies))
    found = []

    async def play() -> None:
        async with (
            open_door(session, models={"small": "auxiliary"}) as door,
            httpx.AsyncClient(base_url=door.url, headers={"authorization": f"Bearer {door.key}"}) as client,
        ):

            async def ask(text: str, model: str = "policy", **headers: str) -> None:
                body = {"model": model, "messages": [{"role": "user", "content": text}], "tools": [ADD]}
                answer = await client.post("/v1/chat/completions", json=body, headers=headers)
                answer.raise_for_status()
                found.append(session.last_words and session.last_words.content)

            await ask("Do it.")
            await ask("A title?", "small")
            await ask("Help.", **{"x-claude-code-agent-id": "sub", "x-claude-code-parent-agent-id": "main"})
            await ask("Go on.")

    asyncio.run(play())
    assert found == ["The answer is 42."] * 4


def test_a_session_without_replies_has_no_last_words() -> None:
    assert opened(says()).last_words is None
