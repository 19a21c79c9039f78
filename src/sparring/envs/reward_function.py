"""`[env] reward = "path.py:function"`: a world that is nothing but a function over the rows of a data file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sparring.envs.base import Env
from sparring.envs.called import ByName
from sparring.envs.executor import cooperative
from sparring.envs.tools.python import PythonTool
from sparring.types import Task


OUTSIDE = "outside"
"""Name, in the place of a function's, for rewards that come from outside."""


def outside() -> None:
    """Return no reward: `[rollout] rewards_within_s` says how long one from outside is awaited."""


class RewardFunction(Env):
    """Single-turn: the prompt comes from the row, the reward from a function called by parameter name.

    The function may ask for `completion` (the final text), `task`, and any column of the row: `answer`, `prompt`, ...
    """

    @cooperative
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self._called = ByName(function)

    def check(self, task: Task) -> None:
        """Refuse a row without the columns that the function takes.

        Raises:
            BadInput: it lacks one.
        """
        self._called.check(task)

    def reward(self, completion: str, task: Task) -> Any:
        """Call the function."""
        return self._called.function(**self._called.arguments(completion, task))


class RewardFunctionWithPython(PythonTool, RewardFunction):
    """The same with the python tool."""
