"""`[env] reward = "path.py:function"`: a world that is nothing but a function over the rows of a data file."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Any

from sparring.envs.base import Env
from sparring.envs.tools.python import PythonTool
from sparring.errors import refusal
from sparring.types import Task


class RewardFunction(Env):
    """Single-turn: the prompt comes from the row, the reward from a function called by parameter name.

    The function may ask for `completion` (the final text), `task`, and any column of the row: `answer`, `prompt`, ...
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self._function = function
        self._wants = tuple(inspect.signature(function).parameters)
        self._texts = {name for name, hint in typing.get_type_hints(function).items() if hint is str}

    def check(self, task: Task) -> None:
        """The row has the columns that the function asks for.

        Raises:
            BadInput: it lacks one.
        """
        missing = [name for name in self._wants if name not in task.data and name not in ("completion", "task")]
        if missing:
            there = ", ".join(sorted(task.data))
            raise refusal(f"task {task.id}", f"a column {missing[0]!r} for the reward function", there, "map it in env.columns")

    def reward(self, completion: str, task: Task) -> Any:
        """Call the function. A column that it hints as `str` arrives as text even where the file has a number."""
        given: Mapping[str, Any] = {**task.data, "completion": completion, "task": task}
        return self._function(**{name: str(given[name]) if name in self._texts else given[name] for name in self._wants})


class RewardFunctionWithPython(PythonTool, RewardFunction):
    """The same with the python tool."""
