"""A part that is any Python function, called by the names of its parameters."""

from __future__ import annotations

import asyncio
import inspect
import typing
from typing import Any

from sparring.envs.named import named
from sparring.envs.rubrics.config import Function
from sparring.errors import JudgeError, refusal
from sparring.protocols import Sandbox
from sparring.types import Task


class CalledFunction:
    """Calls it: a coroutine function on the event loop, another on a thread.

    Raises:
        BadInput: it is not there, or no function.
    """

    def __init__(self, config: Function, where: str) -> None:
        self._timeout_s, self._where = config.timeout_s, where
        self._function = named(config.function, where)
        if not callable(self._function) or isinstance(self._function, type):
            raise refusal(where, "a function", repr(self._function), "name a function of the file")
        self._wants = tuple(inspect.signature(self._function).parameters)
        self._texts = {name for name, hint in typing.get_type_hints(self._function).items() if hint is str}

    def check(self, task: Task) -> None:
        """The row has the columns that the function asks for.

        Raises:
            BadInput: it lacks one.
        """
        missing = [name for name in self._wants if name not in task.data and name not in ("completion", "task")]
        if missing:
            there = ", ".join(sorted(task.data))
            raise refusal("row", f"a column {missing[0]!r} for the function", there, "map it in env.columns")

    async def value(self, completion: str, task: Task, box: Sandbox | None) -> Any:
        """What it says. A column that it hints as `str` arrives as text even where the file has a number.

        Raises:
            JudgeError: it took too long. What it raises itself is the caller's to classify.
        """
        given = {**task.data, "completion": completion, "task": task}
        arguments = {name: str(given[name]) if name in self._texts else given[name] for name in self._wants}
        limit = asyncio.timeout(self._timeout_s)
        try:
            async with limit:
                if inspect.iscoroutinefunction(self._function):
                    return await self._function(**arguments)
                said = await asyncio.to_thread(self._function, **arguments)
                return await said if inspect.isawaitable(said) else said
        except TimeoutError:
            if not limit.expired():
                raise
            raise JudgeError(f"{self._where}: no answer after {self._timeout_s:g} s") from None
