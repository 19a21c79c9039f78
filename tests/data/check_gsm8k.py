"""Rewards on real rows: every right answer of GSM8K scores 1, every one with a digit changed scores 0.

    python tests/data/check_gsm8k.py path/to/gsm8k-test.jsonl [--checkpoint FOLDER]

The file has a `question` and an `answer` that ends in `#### <number>` in each row (github.com/openai/grade-school-math,
MIT). All nine other digits are tried at every place of the number. Then `sparring eval` runs a checkpoint, a random
model where none is given, on all rows but one. Prints one JSON object as its last line and ends with status 1 if a
figure is not what it must be.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from sparring.envs.config import EnvConfig
from sparring.envs.registry import load_env
from sparring.tasks.files import read_rows
from sparring.types import Task

FINAL = "#### (.+)"
FORMS = {
    "solution": (FINAL, "{reasoning}#### {number}"),
    "boxed": ("", "Therefore, the answer is $\\boxed{{{number}}}$."),
}
"""What an answer looks like: the part's `find`, and the text."""

RECIPE = """
[run]
name = "gsm8k"
directory = "{folder}"
stages = ["eval"]
threads = 1
[models.policy]
path = "{checkpoint}"
[env]
data = "{data}"
held_out = {held_out}
columns = {{ prompt = "question" }}
[env.rubric.right]
kind = "math"
find = "#### (.+)"
column_find = "#### (.+)"
[rollout.sampling]
max_turn_tokens = 16
[observe]
sinks = []
progress = "off"
"""


def settings(path: Path, kind: str, find: str) -> EnvConfig:
    """The world over the file."""
    part = {"kind": kind, "find": find, "column_find": FINAL}
    given = {
        "data": str(path),
        "held_out": 1,
        "demonstrations": 1 << 30,
        "columns": {"prompt": "question"},
        "rubric": {"right": part},
    }
    return msgspec.convert(given, EnvConfig)


def changed(number: str) -> Iterator[str]:
    """The number with every digit replaced by every other one."""
    for place, digit in enumerate(number):
        if digit.isdigit():
            yield from (f"{number[:place]}{other}{number[place + 1 :]}" for other in "0123456789" if other != digit)


async def figures(path: Path, kind: str, form: str) -> dict[str, int]:
    """How many right and wrong answers of one form were scored, and how many of these got 1."""
    find, text = FORMS[form]
    factory = load_env(settings(path, kind, find), read_rows)
    world = factory.make()

    async def scores(task: Task) -> tuple[float, list[float]]:
        reasoning, _, number = task.data["answer"].rpartition("#### ")
        answers = [text.format(reasoning=reasoning, number=n) for n in (number, *changed(number))]
        right, *wrong = await asyncio.gather(*(world.reward(answer, task) for answer in answers))
        return right.reward, [score.reward for score in wrong]

    tasks = [task for split in ("demonstration", "eval") for task in every(factory.tasks(split, 0))]
    done = [await scores(task) for task in tasks]
    wrong = [reward for _, rewards in done for reward in rewards]
    return {
        "right": len(done),
        "right_at_1": sum(r == 1 for r, _ in done),
        "wrong": len(wrong),
        "wrong_above_0": sum(map(bool, wrong)),
    }


def every(source: Any) -> Iterator[Task]:
    """A finite stream's tasks."""
    while (task := source.next()) is not None:
        yield task


def evaluated(path: Path, checkpoint: Path | None, rows: int) -> int:
    """Exit status of `sparring eval` on all rows but one, which the world keeps for training."""
    from sparring.cli.main import main

    with tempfile.TemporaryDirectory() as folder:
        given = checkpoint or random_model(path, Path(folder) / "model")
        recipe = Path(folder) / "gsm8k.toml"
        recipe.write_text(RECIPE.format(folder=folder, checkpoint=given, data=path, held_out=rows - 1))
        return main(["eval", str(recipe), str(given), "--tasks", str(rows - 1)])


def random_model(path: Path, folder: Path) -> Path:
    """A tiny one, whose tokenizer knows the file's words."""
    from sparring.model.config import InitConfig
    from sparring.model.create import create
    from sparring.render.train_tokenizer import train_tokenizer

    shape = InitConfig(hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=64)
    train_tokenizer([row["prompt"] for row in read_rows(str(path), {"prompt": "question"})], shape.vocab_size, folder)
    create(shape, shape.vocab_size, folder, seed=1)
    return folder


def check(path: Path, checkpoint: Path | None) -> dict[str, Any]:
    """All figures, `passed` among them."""
    found = {f"{kind}/{form}": asyncio.run(figures(path, kind, form)) for kind in ("number", "math") for form in FORMS}
    good = all(f["right_at_1"] == f["right"] and f["wrong_above_0"] == 0 for f in found.values())
    status = evaluated(path, checkpoint, found["number/solution"]["right"])
    return {"passed": good and status == 0, **found, "eval_status": status}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("--checkpoint", type=Path)
    arguments = parser.parse_args()
    result = check(arguments.path, arguments.checkpoint)
    print(json.dumps(result))
    sys.exit(not result["passed"])
