"""Two domains of very different length: sums with a calculator in 2 turns, and walks through folders of up to 20.

    sums    "346 + 278 = ?"                       the model asks `add`, and answers what it says
    walks   "Open a. Say the word that you find." the model opens a folder, reads in it which one is next, and says the word in the last

`[env.args] domain` picks one of them; "both" deals them in turn. Its expert can be made impatient,
and then says on the way what only it knows: from such demonstrations a model learns how to ask, and to guess instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Literal

import msgspec

from sparring.envs.base import Env, ToolError, tool
from sparring.types import Message, Task, ToolCall

LETTERS = "abcdefghijklmnopqrstuvwxyz"
WORDS = ("red", "blue", "green", "black", "white", "pink", "gold", "grey")


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[env.args]`."""

    domain: Literal["sums", "walks", "both"] = "both"
    """Which tasks there are."""

    patience: float = 1.0
    """Of the demonstrations, how many ask to the end; the others say the answer on the way, which the expert knows and no policy can."""


class Both(Env):
    """One task of either domain."""

    Args = Settings

    def generate(self, random: Random) -> Mapping[str, object]:
        """A sum, or a walk through folders without a repetition."""
        domain = random.choice(("sums", "walks")) if self.args.domain == "both" else self.args.domain
        if domain == "sums":
            a, b = random.randint(100, 999), random.randint(100, 999)
            return {"prompt": f"{a} + {b} = ?", "answer": str(a + b), "a": a, "b": b, "tag": "sums"}
        path = random.sample(LETTERS, random.randint(3, 18))
        prompt = f"Open {path[0]}. Say the word that you find. ({random.randint(0, 9999)})"
        return {"prompt": prompt, "answer": random.choice(WORDS), "path": path, "tag": "walks"}

    @tool
    def add(self, a: int, b: int) -> int:
        """Adds two numbers."""
        return a + b

    @tool(name="open")
    def folder(self, name: str) -> str:
        """Opens a folder and says what is in it."""
        path = self.task.data.get("path", [])
        if name not in path:
            raise ToolError("no such folder")
        place = path.index(name)
        return f"next: {path[place + 1]}" if place + 1 < len(path) else f"word: {self.task.data['answer']}"

    def reward(self, completion: str, task: Task) -> float:
        """1 for the sum or the word, and nothing else."""
        return float(completion.strip() == task.data["answer"])

    def expert(self, task: Task):
        """Asks once for a sum, and opens folder after folder, until its patience ends."""
        random = Random(task.data["prompt"])
        length = len(task.data.get("path", [0]))
        asks = length if random.random() < self.args.patience else random.randrange(length)

        def reply(messages: Sequence[Message]) -> Message:
            last = messages[-1]
            if sum(message.role == "tool" for message in messages) == asks < length:
                return Message(role="assistant", content=task.data["answer"])
            if last.role == "tool" and not last.content.startswith("next: "):
                return Message(role="assistant", content=last.content.removeprefix("word: "))
            if task.data["tag"] == "sums":
                return _call("add", {"a": task.data["a"], "b": task.data["b"]})
            return _call("open", {"name": last.content[6:] if last.role == "tool" else task.data["path"][0]})

        return reply


def _call(name: str, arguments: dict[str, object]) -> Message:
    return Message(role="assistant", tool_calls=(ToolCall(id="call_0", name=name, arguments=arguments),))
