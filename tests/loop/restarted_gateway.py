"""A harness of OpenAI's client that kills the gateway's process in mid-stream, and sends its request again."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import httpx
import openai

from sparring.protocols import Episode
from sparring.types import Message

PROCESS = "TEST_GATEWAY_PROCESS"
"""Variable of the environment: the file with the id of the gateway's process."""

KILL_AT = "TEST_KILL_GATEWAY_AT"
"""Variable of the environment: of each of its first processes, the number of events behind which it is killed."""

events, kills, killed = 0, 0, ""


def count() -> None:
    """Count one event of the gateway's process, and kill it where that is the last."""
    global events, kills, killed
    behind = os.environ.get(KILL_AT, "").split()
    if kills == len(behind) or (process := Path(os.environ[PROCESS]).read_text()) == killed:
        return
    events += 1
    if events == int(behind[kills]):
        os.kill(int(process), signal.SIGKILL)
        events, kills, killed = 0, kills + 1, process


async def whole(client: openai.AsyncOpenAI, messages: list[Any]) -> tuple[str, str | None]:
    """Return the text and the finish reason of a streamed reply, however often its connection breaks."""
    while True:
        text, reason = "", None
        try:
            async for chunk in await client.chat.completions.create(model="policy", messages=messages, stream=True):
                count()
                for choice in chunk.choices:
                    text += choice.delta.content or ""
                    reason = choice.finish_reason or reason
        except (httpx.TransportError, openai.APIConnectionError):
            continue
        return text, reason


async def agent(episode: Episode, openai_client: openai.AsyncOpenAI) -> None:
    """Hold the conversation, every reply streamed."""
    opened = await episode.env.open(episode.task, episode.box)
    messages: list[Any] = [{"role": m.role, "content": m.content} for m in (*episode.task.messages, *opened.messages)]
    client = openai_client.with_options(max_retries=30)
    while True:
        text, reason = await whole(client, messages)
        messages.append({"role": "assistant", "content": text})
        answer = await episode.env.step(Message(role="assistant", content=text))
        if answer.done or reason == "length":
            return
        messages += [{"role": message.role, "content": message.content} for message in answer.messages]
