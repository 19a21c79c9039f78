"""Tasks of recipes/terminal, played by commands alone."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from sparring.types import BoxSpec, Task
from sparring.user_files.named import named

WORLD = Path(__file__).parents[2] / "recipes/terminal/world.py"
SPEC = {"timeout_s": 10.0}


@functools.cache
def of_world(name: str) -> Any:
    """What recipes/terminal/world.py defines."""
    return named(f"{WORLD}:{name}", "env.name")


KINDS = of_world("KINDS")


def drawn(kind: str, seed: int, **args: Any) -> dict[str, Any]:
    """Data of a task."""
    terminal = of_world("Terminal")
    data: dict[str, Any] = terminal(terminal.Args(kinds=(kind,), **args)).generate(Random(seed))
    return data


def task_of(data: dict[str, Any]) -> Task:
    return Task(id=data["kind"], env="Terminal", messages=(), data=data, box=BoxSpec(**SPEC))


async def played(box: Any, data: dict[str, Any], commands: Sequence[str]) -> tuple[float, list[str]]:
    """The reward of commands in the tool's shell, and what it answers."""
    terminal = of_world("Terminal")
    env = terminal(terminal.Args(kinds=(data["kind"],)))
    await env.open(task_of(data), box)
    said = [await env.bash(command) for command in commands]
    score = await env.score(None)
    await env.close()
    assert score.success is (score.reward == 1.0)
    return score.reward, said
