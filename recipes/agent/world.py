"""Notes: an agent program is told to write a word into a file; the world reads the file."""

from sparring.envs.base import Env
from sparring.types import Message, Score, ToolCall


WORDS = ("red", "blue", "green", "black")


class Notes(Env):
    """Worth 1 where the file holds the word after at most two turns, 0.4 after more, 0 where it does not.

    Half of the demonstrations look around first, so a policy that imitates them does as well.
    """

    needs_box = True

    def generate(self, random):
        number, word = random.randint(100, 999), random.choice(WORDS)
        return {"prompt": f"Task {number}: write {word} into note.txt.", "word": word, "looks": random.random() < 0.5}

    async def score(self, trajectory):
        try:
            text = (await self.box.read("note.txt")).decode(errors="replace")
        except FileNotFoundError:
            text = ""
        right = text.strip() == self.task.data["word"]
        return Score(reward=float(right) * (1.0 if trajectory.usage.turns <= 2 else 0.4), success=right)

    def expert(self, task):
        commands = ["ls"] if task.data["looks"] else []
        commands.append(f"echo {task.data['word']} > note.txt")

        def reply(messages):
            done = sum(message.role == "tool" for message in messages)
            if done == len(commands):
                return Message(role="assistant", content="Done.")
            call = ToolCall(id=f"call_{done}", name="bash", arguments={"command": commands[done]})
            return Message(role="assistant", tool_calls=(call,))

        return reply
