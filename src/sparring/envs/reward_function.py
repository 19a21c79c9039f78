"""`[env] reward = "path.py:function"`: a world made of a reward function and the rows of a data file."""

from __future__ import annotations

import inspect
from typing import Any

from sparring.envs.base import Env, final_text
from sparring.envs.executor import cooperative
from sparring.envs.reward_calls import ByName
from sparring.envs.tools.python import PythonTool
from sparring.types import Score, Task, Trajectory

OUTSIDE = "outside"
"""Value of `[env] reward` for rewards that come from outside."""


def outside() -> None:
    """Return no reward: it arrives by HTTP, and `rollout.rewards.within_s` bounds the wait for it."""


class RewardFunction(Env):
    """Single-turn world: the prompt comes from the row, the reward from a function called by parameter name
    (`ByName`)."""

    @cooperative
    def __init__(self, called: ByName) -> None:
        super().__init__()
        self._called, self.reward_name = called, called.name
        self._text, self._ids = "", tuple[int, ...]()

    def check(self, task: Task) -> None:
        self._called.check(task)

    @cooperative
    async def score(self, trajectory: Trajectory) -> Score | None:
        """Score the final answer. A function with TRL's signature also gets the answer's token ids, and also scores a
        reply that a limit truncated."""
        answer, self._text = trajectory.answer, final_text(trajectory)
        cut = answer is not None and answer.finish_reason == "length" and self._called.batched
        if answer is not None and answer.message is not None and cut:
            self._text = answer.message.content.strip()
        self._ids = answer.tokens if answer is not None and (self._text or cut) else ()
        return await super().score(trajectory)

    async def reward(self, completion: str, task: Task) -> Any:
        positional, named = self._called.arguments(self._text, task, self._ids)
        result = self._called.function(*positional, **named)
        return self._called.value(await result if inspect.isawaitable(result) else result)


class RewardFunctionWithPython(PythonTool, RewardFunction):
    """Reward-function world with the python tool."""
