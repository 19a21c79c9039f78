"""Part `function`: a Python function called by parameter name."""

from __future__ import annotations

import asyncio
from typing import Any

from sparring.envs.reward_calls import ByName
from sparring.envs.rubrics.config import Function
from sparring.envs.threads import THREADS
from sparring.errors import JudgeError, refusal
from sparring.protocols import Sandbox
from sparring.types import Task
from sparring.user_files.named import named


class CalledFunction:
    """Caller of the function: coroutine functions share one thread, any other call has a thread of its own. Implements
    `Check`.

    Raises:
        BadInput: the function does not exist, is no function, or has parameters that no row can fill.
    """

    def __init__(self, config: Function, where: str) -> None:
        self._timeout_s, self._where = config.timeout_s, where
        function = named(config.function, where)
        if not callable(function) or isinstance(function, type):
            raise refusal(where, "a function", repr(function), "name a function of the file")
        self._called = ByName(function, where)

    def check(self, task: Task) -> None:
        self._called.check(task)

    async def value(self, completion: str, task: Task, box: Sandbox | None) -> Any:
        """Return the function's reward. Its own exceptions are passed on, for the caller to classify.

        Raises:
            JudgeError: the call took too long.
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
