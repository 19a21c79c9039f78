"""A harness whose agent is a process of its own, without Sparring: it asks the model twice, and rewards what it got."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import sparring.rewards
from sparring.gateway.server import open_door
from sparring.protocols import Episode

PROGRAM = """
import http.client, json, runpy, sys

url, key, reward_key, client, prompt = sys.argv[1:]
send = runpy.run_path(client)["send"]
place = url.removeprefix("http://")


def ask(text):
    connection = http.client.HTTPConnection(place)
    body = {"model": "policy", "messages": [{"role": "user", "content": text}]}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Authorization": "Bearer " + key})
    return json.loads(connection.getresponse().read())


def worth(answer):
    return len(answer["choices"][0]["message"]["content"]) % 7 / 8


answers = [ask(prompt), ask(prompt + " Again:")]
for answer in answers:
    send(url, reward_key, worth(answer), of=answer["id"])
send(url, reward_key, sum(map(worth, answers)), parts={"answers": len(answers)})
"""


async def agent(episode: Episode) -> None:
    """Run the program with an interpreter that sees nothing but the standard library."""
    await episode.env.open(episode.task, episode.box)
    async with open_door(episode.session()) as door:
        words = ["-I", "-S", "-c", PROGRAM, door.url, door.key, door.reward_key, str(Path(sparring.rewards.__file__))]
        program = await asyncio.create_subprocess_exec(sys.executable, *words, episode.task.messages[-1].content)
        assert await program.wait() == 0
