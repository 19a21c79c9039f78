"""Rendering of long conversations, and compiling of grammars, beside the event loop, which all rollouts share.

Text is rendered at some 50 ids a millisecond of one thread, and a conversation may have a hundred thousand. What is
long is rendered by a thread of a small pool, while other rollouts go on. Requests of one session are planned in the
order in which they came all the same, so that the record does not depend on how long anything took.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, NamedTuple, TypeVar

from sparring.generation import Constraint, GenerateRequest
from sparring.protocols import Renderer
from sparring.types import Message

T = TypeVar("T")

LONG = 16384
"""Characters of messages from which on they are rendered beside the event loop: 5 to 10 ms."""

VALUE = 16
"""Characters that a value in a call's arguments, a tool's schema or a message counts for."""

THREADS = 2

SEEN = 64
"""Constraints that are known to be compiled; renderers keep as many."""


class Rendering(NamedTuple):
    """Messages that are to be rendered for a turn.

    Attributes:
        long: whether that is done beside the event loop.
        run: renders; may be called on any thread.
    """

    long: bool
    run: Callable[[], Any]


def is_long(messages: Sequence[Message]) -> bool:
    """Return whether the text of messages is so long that work with it is done beside the event loop."""
    return sum([len(message.content) for message in messages]) + VALUE * len(messages) >= LONG


def renders_long(messages: Sequence[Message]) -> bool:
    """Return whether messages, their calls included, take long to render."""
    if is_long(messages):
        return True
    arguments = [call.arguments for message in messages if message.tool_calls for call in message.tool_calls]
    return bool(arguments) and has_many(arguments)


def has_many(values: Iterable[Any]) -> bool:
    """Return whether plain data has so many values, or so much text, that it takes long to render."""
    left, size = list(values), 0
    while left and size < LONG:
        value = left.pop()
        size += VALUE + len(value) if isinstance(value, str) else VALUE
        if isinstance(value, Mapping):
            size += VALUE * len(value)
            left += value.values()
        elif isinstance(value, (list, tuple)):
            left += value
    return size >= LONG


async def apart(work: Callable[..., T], *arguments: Any) -> T:
    """Return what some work comes to that is done beside the event loop. It shares nothing that changes."""
    return await asyncio.get_running_loop().run_in_executor(_pool(), work, *arguments)


class Planner:
    """Planner of the turns of one session, in the order in which they were asked for."""

    def __init__(self) -> None:
        self._in_turn = asyncio.Lock()

    async def plan(self, steps: Generator[Rendering, Any, T], check: Callable[[], None] | None) -> T:
        """Return the turn that some steps come to.

        Args:
            steps: of the planning; see `Tree.planning`.
            check: done before, beside the event loop; raises where the conversation is refused.
        """
        async with self._in_turn:
            if check is not None:
                await apart(check)
            done: Any = None
            while True:
                try:
                    rendering = steps.send(done)
                except StopIteration as end:
                    turn: T = end.value
                    return turn
                done = await apart(rendering.run) if rendering.long else rendering.run()


class Binder:
    """Binding of requests' stop strings and constraints to ids. A grammar is compiled beside the event loop: a large
    one takes a second, and so does the table of a vocabulary that the first one needs.

    Args:
        renderer: binds.
    """

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._seen: set[Constraint] = set()

    async def bind(self, request: GenerateRequest) -> GenerateRequest:
        """Return a request as `Renderer.bind` does.

        Raises:
            BadInput: the constraint does not compile, or there is an empty stop string.
        """
        constraint = request.sampling.constraint
        if constraint is None or constraint in self._seen and len(constraint.source) < LONG:
            return self._renderer.bind(request)
        bound = await apart(self._renderer.bind, request)
        if len(self._seen) >= SEEN:
            self._seen.clear()
        self._seen.add(constraint)
        return bound


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(THREADS, thread_name_prefix="rendering")
