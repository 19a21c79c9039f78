"""Write the tasks of ScienceWorld that the recipe asks: `python recipes/scienceworld/tasks.py data/scienceworld`.

train.jsonl has the game's own training variations of each family, with the way that the game knows; test.jsonl its test
variations, without. Every one of them is solved once before it is written. The game draws its ways anew each time.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

from world import Simulator, check_installed

FAMILIES = ("find-non-living-thing", "lifespan-longest-lived")
SIMPLIFICATIONS = "easy"
"""Doors and containers are open, and one may teleport."""

DRAWS = 8
"""Ways of a variation that are drawn before it is left out."""

VERBS = {"look", "around", "focus", "on", "pick", "up", "move", "to", "in", "inventory"}


def rows(simulator: Simulator, family: str, variations: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Yield a row for each variation of which the game knows a way that can be read and that scores 100."""
    for variation in variations:
        task = {"family": family, "variation": variation, "simplifications": SIMPLIFICATIONS}
        for _ in range(DRAWS):
            prompt, way = drawn(simulator, task)
            if simulator.score == 100:
                yield {"id": f"{family}-{variation}", "domain": family, "prompt": prompt, **task, "gold": way}
                break
        else:
            print(f"left out: {family} {variation}", file=sys.stderr)


def drawn(simulator: Simulator, task: Mapping[str, Any]) -> tuple[str, list[str]]:
    """Draw a way of the game and go it, up to a word that was not read; what it scores, the simulator knows.

    Doors that are open are not opened, and there is a look around before a thing is named that was not seen.

    Returns:
        the task's prompt, and the actions.
    """
    look = simulator.begin(**task, gold=True)
    prompt = f"{simulator.game.get_task_description().removeprefix('Task Description:').strip()}\n\n{look}"
    read, way = words(prompt) | VERBS, []

    def take(action: str) -> None:
        read.update(words(simulator.act(action)))
        way.append(action)

    for action in simulator.game.get_gold_action_sequence():
        if simulator.over or action.startswith("open door"):
            continue
        named = set() if action.startswith("go to") else words(action)
        if not named <= read:
            take("look around")
        if not named <= read:
            break
        take(action)
    return prompt, way


def words(text: str) -> set[str]:
    """Return the words of a text."""
    return set(re.findall(r"\w+", text.lower()))


def main(folder: Path) -> None:
    """Write both files, in an order that mixes the families."""
    check_installed()
    simulator = Simulator()
    written: dict[str, list[dict[str, Any]]] = {"train": [], "test": []}
    for family in FAMILIES:
        simulator.begin(family, 0, SIMPLIFICATIONS)
        split = {"train": simulator.game.get_variations_train(), "test": simulator.game.get_variations_test()}
        for name, variations in split.items():
            written[name] += rows(simulator, family, variations)
    simulator.close()
    folder.mkdir(parents=True, exist_ok=True)
    for name, found in written.items():
        Random(0).shuffle(found)
        shown = [row if name == "train" else {key: row[key] for key in row if key != "gold"} for row in found]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in shown))
        longest = max(len(row["gold"]) for row in found)
        print(f"{name}: {len(found)} tasks, solved in at most {longest} actions")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "data/scienceworld"))
