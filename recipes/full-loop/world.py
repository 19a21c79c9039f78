"""Two domains of very different length: people who are asked in 2 or 3 turns, and walks through folders of up to 20.

    people  "Which colour does q like? (4711)"           the model asks q, who may send it on to m, and says the colour
    walks   "Open a. Say the word that you find. (815)"  the model opens a folder, reads in it which one is next, and says the word in the last

`[env.args] domain` picks one of them; "both" deals them in turn. The expert can be made impatient: a model then learns from it how to ask, and to
guess.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Literal

import msgspec

from sparring.envs.base import Env, ToolError, tool
from sparring.types import Message, Task, ToolCall

LETTERS = "abcdefghijklmnopqrstuvwxyz"
WORDS = ("red", "blue", "green", "black", "white", "pink", "gold", "grey")
LONGEST = {"people": (1, 2), "walks": (3, 18)}


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[env.args]`."""

    domain: Literal["people", "walks", "both"] = "both"
    """Which tasks there are."""

    patience: float = 1.0
    """Of the demonstrations, how many ask to the end; in the others the expert says the word on the way, which no policy can know."""


class Both(Env):
    """One task of either domain: a path of letters, and a word at its end."""

    Args = Settings

    def generate(self, random: Random) -> Mapping[str, object]:
        """A path without a repetition; the number makes prompts different that are otherwise the same."""
        domain = random.choice(tuple(LONGEST)) if self.args.domain == "both" else self.args.domain
        path = random.sample(LETTERS, random.randint(*LONGEST[domain]))
        asked = (
            f"Which colour does {path[0]} like?"
            if domain == "people"
            else f"Open {path[0]}. Say the word that you find."
        )
        return {
            "prompt": f"{asked} ({random.randint(0, 9999)})",
            "answer": random.choice(WORDS),
            "path": path,
            "tag": domain,
        }

    @tool
    def ask(self, name: str) -> str:
        """Asks somebody for a colour."""
        return self._beyond("people", name, "the same as {}")

    @tool(name="open")
    def folder(self, name: str) -> str:
        """Opens a folder and says what is in it."""
        return self._beyond("walks", name, "next: {}")

    def _beyond(self, domain: str, name: str, on: str) -> str:
        path = self.task.data["path"] if self.task.data["tag"] == domain else []
        if name not in path:
            raise ToolError("nothing there")
        place = path.index(name)
        return on.format(path[place + 1]) if place + 1 < len(path) else str(self.task.data["answer"])

    def reward(self, completion: str, task: Task) -> float:
        """1 for the word, and nothing else."""
        return float(completion.strip() == task.data["answer"])

    def expert(self, task: Task) -> Callable[[Sequence[Message]], Message]:
        """Goes on along the path until its patience ends."""
        path, name = task.data["path"], "ask" if task.data["tag"] == "people" else "open"
        random = Random(task.data["prompt"])
        patience = len(path) if random.random() < self.args.patience else random.randrange(len(path))

        def reply(messages: Sequence[Message]) -> Message:
            gone = sum(message.role == "tool" for message in messages)
            if gone == patience:
                return Message(role="assistant", content=task.data["answer"])
            return Message(
                role="assistant", tool_calls=(ToolCall(id="call_0", name=name, arguments={"name": path[gone]}),)
            )

        return reply
