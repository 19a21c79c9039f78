"""`[env] reward = "path.py:function"`: a world that is nothing but a function over the rows of a data file."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from sparring.envs.base import Env, final_text
from sparring.envs.called import ByName
from sparring.envs.executor import cooperative
from sparring.envs.tools.python import PythonTool
from sparring.types import Score, Task, Trajectory

OUTSIDE = "outside"
"""Name, in the place of a function's, for rewards that come from outside."""


def outside() -> None:
    """Return no reward: `[rollout] rewards_within_s` says how long one from outside is awaited."""


class RewardFunction(Env):
    """Single-turn: the prompt comes from the row, the reward from a function called by parameter name (`ByName`)."""

    @cooperative
    def __init__(self, called: ByName) -> None:
        super().__init__()
        self._called = called
        self._ids: Sequence[int] = ()

    def check(self, task: Task) -> None:
        """Refuse a row without the columns that the function takes.

        Raises:
            BadInput: it lacks one.
        """
        self._called.check(task)

    @cooperative
    async def score(self, trajectory: Trajectory) -> Score | None:
        """Score the final answer, whose ids a function of TRL's may ask for."""
        answer = trajectory.answer
        self._ids = answer.tokens if answer is not None and final_text(trajectory) else ()
        return await super().score(trajectory)

    async def reward(self, completion: str, task: Task) -> Any:
        """Call the function."""
        positional, named = self._called.arguments(completion, task, self._ids)
        result = self._called.function(*positional, **named)
        return self._called.value(await result if inspect.isawaitable(result) else result)


class RewardFunctionWithPython(PythonTool, RewardFunction):
    """The same with the python tool."""
