"""A function of a row, called by the names of its parameters."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from typing import Any

from sparring.errors import refusal
from sparring.types import Task


class ByName:
    """A function that may ask for `completion` (the final text), `task`, and any column of the row: `answer`, `prompt`,
    ...

    Args:
        function: of the user.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self._wants = tuple(inspect.signature(function).parameters)
        self._texts = {name for name, hint in typing.get_type_hints(function).items() if hint is str}

    def check(self, task: Task) -> None:
        """Refuse a row without the columns that the function takes.

        Raises:
            BadInput: it lacks one.
        """
        missing = [name for name in self._wants if name not in task.data and name not in ("completion", "task")]
        if missing:
            there = ", ".join(sorted(task.data))
            raise refusal(
                f"task {task.id}", f"a column {missing[0]!r} for the reward function", there, "map it in env.columns"
            )

    def arguments(self, completion: str, task: Task) -> dict[str, Any]:
        """Return the arguments of its call. A column that it hints as `str` arrives as text even where the file has a
        number."""
        available = {**task.data, "completion": completion, "task": task}
        return {name: str(available[name]) if name in self._texts else available[name] for name in self._wants}
