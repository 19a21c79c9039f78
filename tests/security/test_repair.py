"""`recipes/agent/world.py` is had by nothing but files, whatever the program names them and leaves beside them."""

from __future__ import annotations

import random
import runpy
from pathlib import Path
from typing import Any

import pytest
from suite import short_of

from sparring.rollout.guarded_env import GuardedEnv
from sparring.types import Task

WORLD = runpy.run_path(str(Path(__file__).resolve().parents[2] / "recipes/agent/world.py"))
NAMES = WORLD["NAMES"]
SEEDS = range(4)
OBEYS = """
while said=$(sh check) && [ "$said" != ok ]; do
  case $said in missing:*) touch ${said#* };; extra:*) rm ${said#* };; esac
done
echo $said
"""
GUESSES = {
    "one file named as all": "rm -f ?; touch -- ' {missing} '",
    "lines of one name": "rm -f ?; touch -- \"$(printf '{lines}')\"",
    "folders": "rm -rf ?; for n in {missing}; do mkdir $n; done",
    "links to a file": "rm -rf ?; for n in {missing}; do ln -s /box/check $n; done",
    "links to nothing": "rm -rf ?; for n in {missing}; do ln -s nowhere $n; done",
    "pipes": "rm -rf ?; for n in {missing}; do mkfifo $n; done",
    "names beside": 'rm -rf ?; for n in {missing}; do touch $n.txt ./-$n "$n " .$n; done',
    "another folder": "rm -rf ?; mkdir box; for n in {missing}; do touch box/$n /tmp/$n /agent/$n 2> /dev/null; done",
    "an ls of its own": "rm -rf ?; mkdir bin; printf '#!/bin/sh\\necho {missing}\\n' > bin/ls; chmod +x bin/ls",
    "code beside": "rm -rf ?; for m in os stat sys json; do echo 'print(\"{missing}\")' > $m.py; done",
    "all of them": "touch a b c d e f",
    "none of them": "rm -rf ?",
    "a check that says ok": "printf 'echo ok' > check",
}


def task_of(seed: int) -> Task:
    data = WORLD["Repair"]().generate(random.Random(seed))
    return Task(id=str(seed), env="repair", messages=(), data=data, seed=seed)


async def reward(box: Any, task: Task, command: str) -> tuple[float, str]:
    env = WORLD["Repair"]()
    await GuardedEnv(lambda: env).open(task, box)
    said = (await box.exec(["sh", "-c", command])).stdout.strip()
    return (await env.score(None)).reward, said


@pytest.mark.parametrize("guess", short_of(GUESSES, ["lines of one name", "links to a file", "code beside"]))
def test_it_is_not_had_by_names_or_by_what_is_no_file(in_box: Any, guess: str) -> None:
    for seed in SEEDS:
        task = task_of(seed)
        missing = " ".join(name for name in NAMES if task.data["wanted"][name])
        command = GUESSES[guess].replace("{missing}", missing).replace("{lines}", missing.replace(" ", "\\n"))
        worth = in_box(lambda box, task=task, command=command: reward(box, task, command))[0]
        assert worth == float(guess == "none of them" and not missing)


def test_its_check_names_what_is_wrong_until_nothing_is(in_box: Any) -> None:
    for seed in SEEDS:
        assert in_box(lambda box, seed=seed: reward(box, task_of(seed), OBEYS)) == (1.0, "ok")


def test_its_check_says_what_is_wrong_first_in_every_state(in_box: Any) -> None:
    task = task_of(1)

    async def work(box: Any) -> list[str]:
        await GuardedEnv(WORLD["Repair"]).open(task, box)
        said = []
        for state in ("", "a", "abcdef", "bdf"):
            await box.exec(["sh", "-c", "rm -f ?; for n in " + " ".join(state) + "; do touch $n; done"])
            said.append((await box.exec(["sh", "check"])).stdout.strip())
        return said

    def first(state: str) -> str:
        wrong = next((n for n, wanted in task.data["wanted"].items() if wanted != (n in state)), None)
        return "ok" if wrong is None else f"{'missing' if task.data['wanted'][wrong] else 'extra'}: {wrong}"

    assert in_box(work) == [first(state) for state in ("", "a", "abcdef", "bdf")]


def test_reading_its_check_tells_nothing() -> None:
    """The text differs between two tasks in digests alone: every word and every name stands in each."""
    texts = [WORLD["_check"](task_of(seed).data["wanted"], "salt").partition("<<'END'\n") for seed in SEEDS]
    assert len({head for head, _, _ in texts}) == 1
    keys = [[line.split()[0] for line in table.splitlines()[:-1]] for _, _, table in texts]
    assert all(each == keys[0] for each in keys) and len(set(keys[0])) == 64
    words = [line.split()[1] for _, _, table in texts for line in table.splitlines()[:-1]]
    assert len(set(words)) > 150, "a word masked by the digest of its state"
