"""Clients that are killed in mid-stream: a program that sends one request, and a harness that kills its run.

    killed_client.py ADDRESS PORT KEY BODY

sends a request and prints every line of its answer as it comes.
"""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparring.protocols import Episode

KILL_AT = "TEST_KILL_AT"
"""Variable of the environment: number of streamed events behind which the run is killed; 0: never."""

events = 0


def count() -> None:
    """Count one event of this process, and kill it where that is the last."""
    global events
    events += 1
    if events == int(os.environ.get(KILL_AT, "0")):
        os.kill(os.getpid(), signal.SIGKILL)


async def agent(episode: Episode) -> None:
    """Hold the conversation through OpenAI's client, every reply streamed."""
    import openai

    from sparring.gateway.server import open_door
    from sparring.types import Message

    opened = await episode.env.open(episode.task, episode.box)
    async with (
        open_door(episode.session()) as door,
        openai.AsyncOpenAI(base_url=f"{door.url}/v1", api_key=door.key) as client,
    ):
        messages: list[Any] = [
            {"role": message.role, "content": message.content} for message in (*episode.task.messages, *opened.messages)
        ]
        while True:
            text, reason = "", None
            async for chunk in await client.chat.completions.create(model="policy", messages=messages, stream=True):
                count()
                for choice in chunk.choices:
                    text += choice.delta.content or ""
                    reason = choice.finish_reason or reason
            messages.append({"role": "assistant", "content": text})
            answer = await episode.env.step(Message(role="assistant", content=text))
            if answer.done or reason == "length":
                return
            messages += [{"role": message.role, "content": message.content} for message in answer.messages]


def main() -> None:
    """Send a request and print its answer."""
    import http.client
    import sys

    host, port, key, body = sys.argv[1:]
    connection = http.client.HTTPConnection(host, int(port))
    connection.request("POST", "/v1/chat/completions", body, {"authorization": f"Bearer {key}"})
    answer = connection.getresponse()
    print(answer.status, flush=True)
    while line := answer.readline():
        print(line.decode().rstrip("\n"), flush=True)


if __name__ == "__main__":
    main()
