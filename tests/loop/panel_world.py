"""A world whose proposer is answered by two solvers, harnesses for it, and harnesses and worlds that are refused."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random

from sparring.envs.base import Env
from sparring.errors import LimitReached
from sparring.protocols import Episode
from sparring.types import Message, Observation, Score, Trajectory


class Panel(Env):
    """Everybody earns a little, by the length of what they say."""

    roles = ("proposer", "solver/0", "solver/1")

    def generate(self, random: Random) -> Mapping[str, str]:
        return {"prompt": f"Ask about {random.randint(0, 999)}."}

    async def step_of(self, role: str, reply: Message) -> Observation:
        return Observation(messages=(Message(role="user", content=reply.content or "?"),), reward=0.1)

    async def score_all(self, trajectories: Mapping[str, Trajectory]) -> Score:
        said = {role: _text(trajectory) for role, trajectory in trajectories.items()}
        return Score(reward=0.0, per_role={role: len(text) % 7 / 10 for role, text in said.items()})


def _text(trajectory: Trajectory) -> str:
    replies = (s.message for s in trajectory.segments if s.message is not None and s.message.role == "assistant")
    return "".join(reply.content for reply in replies)


class Twins(Panel):
    """Two roles of one name."""

    roles = ("solver", "solver")


async def ask_the_panel(episode: Episode) -> None:
    """The proposer, then both solvers, whoever is cut short."""
    await episode.env.open(episode.task, episode.box)
    messages = episode.task.messages
    for role in Panel.roles:
        try:
            reply = await episode.session(role).complete(messages)
        except LimitReached:
            reply = Message(role="assistant")
        answer = await episode.env.step(reply, role)
        messages = answer.messages if role == "proposer" else messages


async def ask_a_stranger(episode: Episode) -> None:
    """A role that no world here names."""
    await episode.env.open(episode.task, episode.box)
    await episode.session("stranger").complete(episode.task.messages)


async def ask_nobody(episode: Episode) -> None:
    """The world is opened, and that is all."""
    await episode.env.open(episode.task, episode.box)


class AskForBrevity:
    """A chat that begins with a wish of its own."""

    async def run(self, episode: Episode) -> None:
        seen = await episode.env.open(episode.task, episode.box)
        messages = [*episode.task.messages, *seen.messages, Message(role="user", content="Be brief.")]
        while not seen.done:
            reply = await episode.session().complete(messages, episode.env.tools)
            seen = await episode.env.step(reply)
            messages += [reply, *seen.messages]
