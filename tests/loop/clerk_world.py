"""A world for an agent program: it reads the folder that the program leaves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random

from sparring.envs.base import Env
from sparring.types import Message, Score, Task, ToolCall, Trajectory


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
