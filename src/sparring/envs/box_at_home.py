"""`BoxAtHome`: a box that code on an environment's own thread can call, although it belongs to the run's event loop."""

from __future__ import annotations

import inspect
from typing import Any

from sparring.envs.executor import at_home
from sparring.protocols import Sandbox

OPENERS = ("start", "shell", "terminal", "fresh", "fork", "verifier", "beside")
"""Methods whose result belongs to the run's event loop too: a box, or a process, shell or terminal in a box."""


class BoxAtHome:
    """Wrapper of a box, or of a process, shell or terminal in a box. Its coroutine functions run on the run's event
    loop; other attributes are passed through."""

    def __init__(self, box: object) -> None:
        self._box = box

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._box, name)
        if not inspect.iscoroutinefunction(getattr(Sandbox, name, value)):
            return value

        async def forwarded(*arguments: Any, **named: Any) -> Any:
            result = await at_home(value, *arguments, **named)
            return BoxAtHome(result) if name in OPENERS else result

        return forwarded
