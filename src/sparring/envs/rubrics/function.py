"""A part that is any Python function, called by the names of its parameters."""

from __future__ import annotations

import asyncio
from typing import Any

from sparring.envs.called import ByName
from sparring.envs.named import named
from sparring.envs.rubrics.config import Function
from sparring.envs.threads import THREADS
from sparring.errors import JudgeError, refusal
from sparring.protocols import Sandbox
from sparring.types import Task


class CalledFunction:
    """Caller of the function: a coroutine function runs on a thread that all calls share, another on one of its own.

    Raises:
        BadInput: it is not there, or no function, or asks for what it cannot have.
    """

    def __init__(self, config: Function, where: str) -> None:
        self._timeout_s, self._where = config.timeout_s, where
        function = named(config.function, where)
        if not callable(function) or isinstance(function, type):
            raise refusal(where, "a function", repr(function), "name a function of the file")
        self._called = ByName(function, where)

    def check(self, task: Task) -> None:
        """Refuse a row without the columns that the function takes.

        Raises:
            BadInput: it lacks one.
        """
        self._called.check(task)

    async def value(self, completion: str, task: Task, box: Sandbox | None) -> Any:
        """Return the function's reward.

        Raises:
            JudgeError: it took too long. What it raises itself is the caller's to classify.
        """
        positional, named = self._called.arguments(completion, task)
        executor = THREADS.executor(shared=self._called.is_async)
        limit = asyncio.timeout(self._timeout_s)
        try:
            async with limit:
                return self._called.value(await executor.run(self._called.function, *positional, **named))
        except TimeoutError:
            if not limit.expired():
                raise
            raise JudgeError(f"{self._where}: no answer after {self._timeout_s:g} s") from None
        finally:
            executor.close()
