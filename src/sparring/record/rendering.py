"""Rendering of long conversations and compilation of grammars in threads, because all rollouts share the event loop.

A thread renders some 50 ids per millisecond, and a conversation may have a hundred thousand ids. The turns of one
session are still planned in order of arrival, so that the record does not depend on timing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, TypeVar

from sparring.generation import Constraint, GenerateRequest
from sparring.protocols import Renderer
from sparring.types import Message

T = TypeVar("T")

LONG = 16384
"""Number of characters above which messages are rendered in a thread: 5 to 10 ms."""

VALUE = 16
"""Number of characters that are added to a text's length for each message, and for each value in a call's arguments or
a tool's schema, because each message or value takes extra time."""

THREADS = 2

SEEN = 64
"""Maximum number of constraints that are remembered as compiled; renderers cache the same number."""


def renders_long(messages: Sequence[Message]) -> bool:
    """Return whether messages, their calls included, take long to render."""
    if sum([len(message.content) for message in messages]) + VALUE * len(messages) >= LONG:
        return True
    arguments = [call.arguments for message in messages if message.tool_calls for call in message.tool_calls]
    return bool(arguments) and has_many(arguments)


def has_many(values: Iterable[Any]) -> bool:
    """Return whether plain data takes long to render, because of its number of values or the length of its text."""
    rest, size = list(values), 0
    while rest and size < LONG:
        value = rest.pop()
        size += VALUE + len(value) if isinstance(value, str) else VALUE
        if isinstance(value, Mapping):
            size += VALUE * len(value)
            rest += value.values()
        elif isinstance(value, (list, tuple)):
            rest += value
    return size >= LONG


async def in_thread(work: Callable[..., T], *arguments: Any) -> T:
    """Run a function that shares no mutable state in a thread, away from the event loop, and return its result."""
    return await asyncio.get_running_loop().run_in_executor(_pool(), work, *arguments)


async def rendered(long: bool, work: Callable[..., T], *arguments: Any) -> T:
    """Run a function that renders, in a thread if `long`, and return its result."""
    return await in_thread(work, *arguments) if long else work(*arguments)


class Binder:
    """Translator of a request's stop strings and constraint into token ids, by `Renderer.bind`. Grammars are compiled
    in a thread, because a large grammar takes a second. The first grammar also needs a table of the vocabulary, which
    takes another second."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._seen: set[Constraint] = set()

    async def bind(self, request: GenerateRequest) -> GenerateRequest:
        """Return a request as `Renderer.bind` does."""
        constraint = request.sampling.constraint
        if constraint is None or constraint in self._seen and len(constraint.source) < LONG:
            return self._renderer.bind(request)
        bound = await in_thread(self._renderer.bind, request)
        if len(self._seen) >= SEEN:
            self._seen.clear()
        self._seen.add(constraint)
        return bound


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(THREADS, thread_name_prefix="rendering")
