"""Any Python coroutine function as a harness: it holds the conversation as it likes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from sparring.errors import EnvError, boundary
from sparring.protocols import Episode


class CallableHarness:
    """Runs `function(episode)`. What it asks of `episode.session(role)` is recorded; it opens the world if it wants
    one."""

    def __init__(self, function: Callable[[Episode], Awaitable[None]], name: str | None = None) -> None:
        self._function = function
        self.name = name or getattr(function, "__qualname__", type(function).__name__)

    async def run(self, episode: Episode) -> None:
        """Hold the conversation to its end.

        Raises:
            LimitReached: a limit of the task was hit.
            EngineError: the engine failed.
            EnvError: the function raised something untyped.
        """
        with boundary(EnvError, f"harness {self.name}"):
            await self._function(episode)
