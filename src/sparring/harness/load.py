"""`[rollout] harness` -> a `Harness`: the one place where a recipe's harness is found."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from sparring.envs.named import named
from sparring.errors import BadInput, EnvError, boundary, refusal
from sparring.harness.chat import ChatHarness
from sparring.protocols import Episode, Harness

KEY = "rollout.harness"
BUILT_IN: dict[str, type[Harness]] = {"chat": ChatHarness}
EXPECTED = "a coroutine function `async def name(episode)`, or a class with `async def run(self, episode)`"


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


def load_harness(name: str, roles: Sequence[str]) -> Harness:
    """Find the harness of a recipe. One object serves all rollouts of a run.

    Args:
        name: `[rollout] harness`: `chat`, `package.module:name` or `path/to/file.py:name`.
        roles: that the world names.

    Raises:
        BadInput: there is no such harness, what is there is none, or it cannot speak for these roles.
    """
    if name in BUILT_IN:
        if len(roles) > 1:
            do = f"name one that uses episode.session(role) for each: {KEY} = 'file.py:function'"
            raise refusal(
                KEY, f"a harness for the roles {', '.join(roles)}", f"{name!r}, which speaks for one role", do
            )
        return BUILT_IN[name]()
    if ":" not in name:
        expected = f"one of {', '.join(sorted(BUILT_IN))}, or package.module:name, or path/to/file.py:name"
        raise refusal(KEY, expected, repr(name), "correct it")
    return CallableHarness(_run_of(named(name, KEY), name), name)


def _run_of(value: Any, name: str) -> Callable[[Episode], Awaitable[None]]:
    """Return what runs an episode: the function itself, or `run` of an instance of the class.

    Raises:
        BadInput: it is neither.
    """
    if isinstance(value, type) and inspect.iscoroutinefunction(getattr(value, "run", None)):
        with boundary(BadInput, KEY, f"a class {name} that is made without arguments", "correct it"):
            value = value().run
    if not inspect.iscoroutinefunction(value):
        raise refusal(KEY, EXPECTED, f"{type(value).__name__} {name}", "name one")
    return value
