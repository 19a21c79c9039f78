"""A world for an agent program: it reads the folder that the program leaves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random

from sparring.envs.base import Env
from sparring.types import Message, Score, Task, ToolCall, Trajectory

FULL = "It was too long."
"""Words of a program that begins anew because its prompt was too long."""


class Errands(Env):
    """Worth 1 where the note says ok."""

    needs_box = True

    def generate(self, random: Random) -> Mapping[str, str]:
        return {"prompt": f"Errand {random.randint(100, 999)}."}

    async def score(self, trajectory: Trajectory) -> Score:
        """Of the folder alone."""
        assert self.box is not None
        try:
            right = (await self.box.read("note")).decode(errors="replace").strip() == "ok"
        except FileNotFoundError:
            right = False
        return Score(reward=float(right), success=right)

    def expert(self, task: Task):
        def reply(messages: Sequence[Message]) -> Message:
            if messages[-1].role == "tool":
                return Message(role="assistant", content="Done.")
            call = ToolCall(id="call_0", name="sh", arguments={"command": "echo ok > note"})
            return Message(role="assistant", tool_calls=(call,))

        return reply


class Readings(Errands):
    """The same, by an expert that reads until its context is full, and only then writes the note."""

    def expert(self, task: Task):
        def reply(messages: Sequence[Message]) -> Message:
            last = messages[-1]
            if last.role == "tool" and last.content == "nothing":
                return Message(role="assistant", content="Done.")
            command = "echo ok > note" if last.content.startswith(FULL) else "seq 11 40"
            call = ToolCall(id="call_0", name="sh", arguments={"command": command})
            return Message(role="assistant", tool_calls=(call,))

        return reply
