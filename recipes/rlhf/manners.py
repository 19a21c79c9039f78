"""Questions about animals, answered rightly or not, politely or not; people prefer what is right, and of that what is polite.

    python recipes/rlhf/manners.py

writes what the recipe reads: replies.jsonl, how the model has learned to speak, and preferences.jsonl, which of two such
replies to a question somebody would take. The world asks every other question, and the files have only the others.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

from sparring.envs.base import Env
from sparring.types import Score, Task

SOUNDS = {
    "cat": "meow",
    "dog": "woof",
    "cow": "moo",
    "duck": "quack",
    "sheep": "baa",
    "pig": "oink",
    "horse": "neigh",
    "owl": "hoot",
}
NAMES = (
    "Ann",
    "Ben",
    "Cleo",
    "Dan",
    "Eve",
    "Finn",
    "Gus",
    "Hal",
    "Ida",
    "Jo",
    "Kim",
    "Leo",
    "Mia",
    "Ned",
    "Ola",
    "Pia",
)
POLITE = ("Gladly!", "With pleasure.")
BLUNT = ("Whatever.", "Ask somebody else.", "Again?", "Fine.")
RIGHT_SHARE = 0.5
"""Of the replies that the model learns from."""


class Manners(Env):
    """The reward is people's alone: the world only says whether a reply is what they prefer."""

    def generate(self, random: Random) -> Mapping[str, Any]:
        return asked(random, odd=True)

    def reward(self, completion: str, task: Task) -> Score:
        return Score(reward=0.0, success=worth(completion, task.data["answer"]) == 3)


def asked(random: Random, *, odd: bool) -> dict[str, str]:
    """A question, and the sound that is asked for. Whether it is odd decides on whose side it is; both have the same words."""
    who, whose = random.randrange(len(NAMES)), random.randrange(len(NAMES) // 2) * 2
    whose += (who + whose) % 2 != odd
    animal = random.choice(list(SOUNDS))
    prompt = f"{NAMES[who]} asks what the {animal} of {NAMES[whose]} says."
    return {"prompt": prompt, "answer": SOUNDS[animal]}


def replied(random: Random, answer: str) -> str:
    """What the model learns to say: right or not, polite or not, as it happens."""
    said = answer if random.random() < RIGHT_SHARE else random.choice(list(SOUNDS.values()))
    return f"{random.choice(POLITE + BLUNT)} It says {said}."


def worth(reply: str, answer: str) -> int:
    """What people think of a reply: 2 for the right sound alone, 1 for a polite opening."""
    opening, _, said = reply.partition(" It says ")
    return 2 * (said == f"{answer}.") + (opening in POLITE)


def main(replies: int = 600, pairs: int = 700) -> None:
    """Write both files beside this one."""
    random, folder = Random(0), Path(__file__).parent
    shown, compared = list[dict[str, Any]](), list[dict[str, Any]]()
    for _ in range(replies):
        row = asked(random, odd=False)
        said = replied(random, row["answer"])
        shown.append({"messages": [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": said}]})
    while len(compared) < pairs:
        row = asked(random, odd=False)
        worse, better = sorted(
            (replied(random, row["answer"]) for _ in range(2)), key=lambda said: worth(said, row["answer"])
        )
        if worth(worse, row["answer"]) < worth(better, row["answer"]):
            compared.append({"prompt": row["prompt"], "chosen": better, "rejected": worse})
    for name, rows in (("replies", shown), ("preferences", compared)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
