"""Two domains of very different length: sums with a calculator in 2 turns, and walks through folders of up to 20.

    sums    "346 + 278 = ?"                       the model asks `add`, and answers what it says
    walks   "Open a. Say the word that you find." the model opens a folder, reads in it which one is next, and says the word in the last

`[env.args] domain` picks one of them; "both" deals them in turn. Demonstrations leave something to find out where
fewer of them are `hard`.
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

    hard: float = 0.5
    """Of the tasks, how many are hard: numbers of four digits, not three; walks of 9 to 18 folders, not 3 to 8."""


class Both(Env):
    """One task of either domain."""

    Args = Settings

    def generate(self, random: Random) -> Mapping[str, object]:
        """A sum, or a walk through folders without a repetition."""
        hard = random.random() < self.args.hard
        domain = random.choice(("sums", "walks")) if self.args.domain == "both" else self.args.domain
        if domain == "sums":
            least, most = (1000, 9999) if hard else (100, 999)
            a, b = random.randint(least, most), random.randint(least, most)
            return {"prompt": f"{a} + {b} = ?", "answer": str(a + b), "a": a, "b": b, "tag": "sums"}
        path = random.sample(LETTERS, random.randint(9, 18) if hard else random.randint(3, 8))
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
        """Asks once for a sum, and opens folder after folder."""

        def reply(messages: Sequence[Message]) -> Message:
            last = messages[-1]
            if last.role == "tool" and not last.content.startswith("next: "):
                return Message(role="assistant", content=last.content.removeprefix("word: "))
            if task.data["tag"] == "sums":
                return _call("add", {"a": task.data["a"], "b": task.data["b"]})
            return _call("open", {"name": last.content[6:] if last.role == "tool" else task.data["path"][0]})

        return reply


def _call(name: str, arguments: dict[str, object]) -> Message:
    return Message(role="assistant", tool_calls=(ToolCall(id="call_0", name=name, arguments=arguments),))
