"""What one failure struck comes back spread out: rollouts, judges and teachers, on a virtual clock."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable

import msgspec
import pytest
from fates import Fates, make_stack
from virtual import on_virtual_clock

from sparring.algo.annotate.teacher import ScoreClient
from sparring.envs.rubrics.config import Part
from sparring.envs.rubrics.judges import EngineReplies, Judges, Replies
from sparring.envs.rubrics.rubric import Rubric
from sparring.errors import EngineError, SandboxError
from sparring.generation import ScoreRequest, Scores
from sparring.testing.scripted_engine import ScriptedEngine
from sparring.testing.toy import toy_renderer, toy_task
from sparring.types import Task

MANY = 40


def now() -> float:
    return asyncio.get_running_loop().time()


async def rollouts(knocks: list[float]) -> None:
    def broken(number: int) -> SandboxError | None:
        knocks.append(now())
        return SandboxError("gone") if number < MANY else None

    runner = make_stack(Fates(open=broken)).runner
    await asyncio.gather(*(runner.run(toy_task(), rollout_id=f"rl/0/{n}", index=n, seed=n) for n in range(MANY)))


async def judges(knocks: list[float]) -> None:
    def said(request: object) -> list[int]:
        knocks.append(now())
        return toy_renderer().tokenizer.encode("5")

    failing = range(1, MANY + 1)
    engine = ScriptedEngine(said, fail_on=failing)

    async def opened(name: str) -> Replies:
        return EngineReplies(engine, toy_renderer(), name)

    part = msgspec.convert({"kind": "judge", "model": "m", "prompt": "{completion}", "range": [0, 10]}, Part)
    rubric = Rubric({"j": part}, judges=Judges(opened))
    await asyncio.gather(*(rubric.score(f"answer {n}", Task(id="t", env="e", messages=())) for n in range(MANY)))


class Teacher:
    """Scores, but for the first that ask."""

    def __init__(self, knocks: list[float]) -> None:
        self._knocks = knocks

    async def score(self, request: ScoreRequest) -> Scores:
        self._knocks.append(now())
        if len(self._knocks) <= MANY:
            raise EngineError("gone")
        return Scores(logprobs=(), entropies=(), top_ids=(), top_logprobs=(), version=0)


async def teachers(knocks: list[float]) -> None:
    client, teacher = ScoreClient(), Teacher(knocks)
    await asyncio.gather(*(client.score(teacher, ScoreRequest(id=f"row {n}", tokens=(1, 2))) for n in range(MANY)))


@pytest.mark.parametrize("all_ask", [rollouts, judges, teachers])
@on_virtual_clock
async def test_what_failed_together_comes_again_apart(all_ask: Callable[[list[float]], Awaitable[None]]) -> None:
    knocks: list[float] = []
    await all_ask(knocks)
    again = sorted(knocks[-MANY:])
    assert again[-1] - again[0] > 0.3 and max(b - a for a, b in itertools.pairwise(again)) < 0.1
