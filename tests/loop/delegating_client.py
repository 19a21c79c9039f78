"""A harness that is somebody else's program with three sub-agents, and the world that it plays in.

Its requests, in the order in which they come:

    0  lead      begins
    1  first     a sub-agent, told what the lead said
    2  second    another
    3  lead      goes on meanwhile
    4  first     goes on
    5  lead      goes on, told what both sub-agents said last
    6  third     a sub-agent in the background, of which nobody hears
"""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any

import openai

from sparring.envs.base import Env
from sparring.gateway.server import open_door
from sparring.protocols import Episode
from sparring.types import Message, Score, Trajectory

NUM_TURNS = 7
EARLY = frozenset("abcdefghijklm")


def worth(text: str) -> float:
    """What a reply earns: the share of letters in the first half of the alphabet."""
    return sum(letter in EARLY for letter in text) / max(1, len(text))


class Letters(Env):
    """Every reply is worth something of its own; what the lead said last is worth its number of letters more."""

    def generate(self, random: Random) -> Mapping[str, str]:
        return {"prompt": f"Word {random.randint(100, 999)}."}

    async def score(self, trajectory: Trajectory) -> Score:
        """The program ends the rollout by itself."""
        turns = [turn.message.content for turn in trajectory.turns if turn.message]
        per_turn = tuple(worth(text) for text in turns)
        return Score(reward=sum(per_turn) + len(turns[5]) / 10, per_turn=per_turn)


async def agent(episode: Episode) -> None:
    """Play the requests above, one after another."""
    opened = await episode.env.open(episode.task, episode.box)
    async with (
        open_door(episode.session()) as door,
        openai.AsyncOpenAI(base_url=f"{door.url}/v1", api_key=door.key) as client,
    ):
        begun = [{"role": m.role, "content": m.content} for m in (*episode.task.messages, *opened.messages)]
        talks: dict[str, list[Any]] = {"lead": begun, "first": [], "second": [], "third": []}

        async def ask(name: str, told: str = "") -> str:
            talk = talks[name]
            talk += [{"role": "user", "content": told}] if told else []
            headers = {} if name == "lead" else {"x-claude-code-agent-id": name}
            answer = await client.chat.completions.create(model="policy", messages=talk, extra_headers=headers)
            text = answer.choices[0].message.content or ""
            talk.append({"role": "assistant", "content": text})
            return text

        plan = await ask("lead")
        await ask("first", f"Search: {plan}")
        second = await ask("second", f"Check: {plan}")
        await ask("lead", "Meanwhile?")
        first = await ask("first", "More?")
        answer = await ask("lead", f"They say {first} and {second}")
        await ask("third", "Tidy up.")
        await episode.env.step(Message(role="assistant", content=answer))
