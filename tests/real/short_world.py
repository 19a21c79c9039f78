"""Sentences with a word in them: a world small enough for a smoke test of a real model."""

from __future__ import annotations

import random
from typing import Any

from sparring.envs.base import Env
from sparring.types import Task

TOPICS = ("rivers", "bread", "bees", "snow", "bicycles", "lamps", "boats", "apples")
WORDS = ("old", "blue", "quiet", "warm", "small")


class Short(Env):
    """Asks for one sentence about a topic with a word in it; the reward is higher for a shorter one that has the word."""

    def generate(self, random: random.Random) -> dict[str, Any]:
        """Draw a topic and a word."""
        word = random.choice(WORDS)
        return {"prompt": f"Write one sentence about {random.choice(TOPICS)}. Use the word {word}.", "word": word}

    def reward(self, completion: str, task: Task) -> float:
        """Return a half for the word, and with it up to a half for brevity."""
        if task.data["word"] not in completion.lower():
            return 0.0
        return 0.5 + 0.5 / (1 + len(completion.split()) / 10)
