"""A harness of OpenAI's client that kills its gateway's process, or its own, in mid-stream, and sends its request again."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import openai

from sparring.protocols import Episode
from sparring.types import Message

PROCESS = "TEST_GATEWAY_PROCESS"
"""Variable of the environment: the file with the id of the gateway's process."""

FATES = "TEST_KILLED_AT"
"""Variable of the environment: a file of lines, `gateway` or `run` and a number of events behind which it is killed."""

events, killed = 0, ""


def count() -> None:
    """Count one event, and kill whom the first line of the file names if it is the last."""
    global events, killed
    file = Path(os.environ.get(FATES, os.devnull))
    first, *later = file.read_text().splitlines() or [""]
    if not first or (process := Path(os.environ[PROCESS]).read_text()) == killed:
        return
    events += 1
    who, _, behind = first.partition(" ")
    if events >= int(behind):
        events = 0
        file.write_text("\n".join(later))
        if who == "run":
            os.kill(os.getpid(), signal.SIGKILL)
        killed = process
        os.kill(int(process), signal.SIGKILL)


async def whole(client: openai.AsyncOpenAI, messages: list[Any]) -> tuple[str, str | None]:
    """Return the text and the finish reason of a streamed reply, however often no gateway is there to be asked."""
    while True:
        text, reason = "", None
        try:
            stream = await client.chat.completions.create(model="policy", messages=messages, stream=True)
        except openai.APIConnectionError:
            continue
        async for chunk in stream:
            count()
            for choice in chunk.choices:
                text += choice.delta.content or ""
                reason = choice.finish_reason or reason
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
