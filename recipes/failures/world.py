"""A world whose tool is on a host that fails, whatever the policy does; and simpler rules of blame, for comparison."""

import random

import msgspec

from sparring.envs.base import Env, tool
from sparring.errors import PolicyFailure, ToolHostError
from sparring.harness.chat import ChatHarness
from sparring.types import Message, ToolCall

MESSAGE = "tool host: 503 Service Unavailable"


class Shelves(Env):
    """Say how much lies on each shelf. A note says it too, and is sometimes out of date; to look is to know.

    Who looks at every shelf is always right; who copies the note is as often right as the note.
    """

    class Args(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
        """Settings of the world: shelves; the share of notes that are right; the share of calls of which the host
        fails; the share of demonstrations that look although the note is right; whether a rollout that broke may be rebuilt."""

        shelves: int = 4
        right_notes: float = 0.8
        failing: float = 0.0
        looking: float = 0.2
        rebuildable: bool = True

    def __init__(self, args=None):
        super().__init__(args)
        self.rebuildable = self.args.rebuildable

    def generate(self, random):
        counts = [random.randint(0, 9) for _ in range(self.args.shelves)]
        note = list(counts)
        if random.random() >= self.args.right_notes:
            place = random.randrange(self.args.shelves)
            note[place] = (note[place] + random.randint(1, 9)) % 10
        looks = random.random() < self.args.looking or note != counts  # demonstrations are right
        return {"prompt": said(note), "counts": counts, "looks": looks}

    @tool
    def look(self, shelf: int) -> str:
        """Count."""
        if random.random() < self.args.failing:
            raise ToolHostError(MESSAGE)
        counts = self.task.data["counts"]
        return str(counts[shelf - 1]) if 1 <= shelf <= len(counts) else "no such shelf"

    def reward(self, completion, task):
        return float(completion == said(task.data["counts"]))

    def expert(self, task):
        def reply(messages):
            counts = [message.content for message in messages if message.role == "tool"]
            if not task.data["looks"]:
                return Message(role="assistant", content=task.data["prompt"])
            if len(counts) == len(task.data["counts"]):
                return Message(role="assistant", content=" ".join(counts))
            call = ToolCall(id=f"call_{len(counts)}", name="look", arguments={"shelf": len(counts) + 1})
            return Message(role="assistant", tool_calls=(call,))

        return reply


class OldRules:
    """A chat in which a second failure under the same message is the policy's, whatever broke and whatever others do. For
    the comparison alone."""

    def __init__(self):
        self.messages = {}

    async def run(self, episode):
        """Hold the conversation to its end."""
        rollout = episode.env.phases.rollout_id.partition("/retry-")[0]
        try:
            await ChatHarness().run(episode)
        except ToolHostError as error:
            if self.messages.get(rollout) == str(error):
                raise PolicyFailure(f"twice: {error}") from error
            self.messages[rollout] = str(error)
            raise


def said(counts):
    """Write counts as a text."""
    return " ".join(map(str, counts))
