"""A world for tests of the whole path: random text earns different rewards, and an expert shows how to use the tool."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from random import Random

from sparring.envs.base import Env
from sparring.envs.tools.python import PythonTool
from sparring.errors import SandboxError
from sparring.types import Message, Observation, Rollout, Score, Task, ToolCall, Trajectory


class Sums(PythonTool, Env):
    """Adds two digits. Any other text earns a little, by its length, so that untrained policies differ."""

    def generate(self, random: Random) -> Mapping[str, str]:
        a, b = random.randint(0, 99), random.randint(0, 99)
        return {"prompt": f"{a} + {b} = ?", "answer": str(a + b), "tag": "odd" if (a + b) % 2 else "even"}

    async def score(self, trajectory: Trajectory) -> Score:
        """Also of rollouts that were cut short."""
        text = "".join(s.message.content for s in trajectory.segments if s.message and s.message.role == "assistant")
        solved = text.strip() == self.task.data["answer"]
        return Score(reward=1.0 if solved else len(text) % 7 / 10, success=solved)

    def expert(self, task: Task):
        def reply(messages: Sequence[Message]) -> Message:
            if messages[-1].role == "tool":
                return Message(role="assistant", content=messages[-1].content)
            code = f"print({task.data['prompt'].removesuffix(' = ?')})"
            return Message(
                role="assistant", tool_calls=(ToolCall(id="call_0", name="python", arguments={"code": code}),)
            )

        return reply


class Chance(Sums):
    """The same, where about every other rollout succeeds, whatever it says: the last reply's ids add up to an odd
    number."""

    async def score(self, trajectory: Trajectory) -> Score:
        """Also of rollouts that were cut short."""
        odd = sum(trajectory.segments[-1].tokens) % 2 == 1
        return Score(reward=float(odd), success=odd)


class Slow(Chance):
    """The same, whose answers take up to 60 ms; one in twenty breaks, whichever the process's own chance says."""

    async def step(self, reply: Message) -> Observation:
        """Take a while, then break or answer."""
        await asyncio.sleep(random.random() * 0.06)
        if reply.content and random.random() < 0.05:  # the check of the world sends an empty one
            raise SandboxError(f"box: gone, {random.random()}")
        return await super().step(reply)


class SomeUnscored(Sums):
    """The same, where the world leaves odd sums to a second pass, which there is none."""

    async def score(self, trajectory: Trajectory) -> Score:
        """None is not 0."""
        return await super().score(trajectory) if self.task.tag == "even" else Score(reward=None)


class Compared(Sums):
    """The same, where the world itself scores nothing: in a second pass, a rollout earns its place in its group."""

    def __init__(self, args: None = None) -> None:
        super().__init__(args)
        self.scorer = Placed()

    async def score(self, trajectory: Trajectory) -> Score:
        """None is not 0."""
        return Score(reward=None)


class Placed:
    """The n-th rollout of a group is worth n."""

    async def score(self, task: Task, rollouts: Sequence[Rollout], scores: Sequence[Score]) -> Sequence[Score]:
        return [Score(reward=float(rollout.index), success=rollout.index > 0) for rollout in rollouts]
