"""Answers to callers: set by the engine's thread, awaited on the caller's event loop. Torch-free."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import Any

from sparring.engine.turn_pieces import joined
from sparring.generation import Completion, Delta

Delivery = tuple[asyncio.AbstractEventLoop, Callable[[], None]]


class Reply:
    """Answer to one call: a result or an error. Created on the event loop of the caller.

    With `streams` the reply also delivers deltas. Deltas that a slow reader has not read are joined, so the engine
    never waits for a reader, and no more than the answer is stored.

    Attributes:
        asked_s: time of the call, by `time.perf_counter`.
        began_s: time of the first token, by the same clock.
    """

    def __init__(self, *, streams: bool = False) -> None:
        self.streams = streams
        self.asked_s = self.began_s = time.perf_counter()
        self._loop = asyncio.get_running_loop()
        self._future: asyncio.Future[Any] = self._loop.create_future()
        self._news = asyncio.Event()
        self._deltas: list[Delta] = []

    @property
    def given(self) -> bool:
        """True once there is a result or an error."""
        return self._future.done() and not self._future.cancelled()

    async def within(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s`; return whether the result or the error arrived."""
        await asyncio.wait([self._future], timeout=timeout_s)
        return self.given

    async def result(self) -> Any:
        """Wait for the result and return it, or raise its error."""
        return await self._future

    async def pieces(self) -> AsyncGenerator[Delta | Completion, None]:
        """Yield deltas as they arrive and finally the Completion. An error is raised after the tokens sampled before
        the error."""
        while self._deltas or not self._future.done():
            await self._news.wait()
            self._news.clear()
            if self._deltas:
                unread, self._deltas = self._deltas, []
                yield joined(unread)
        yield await self._future

    def extend(self, delta: Delta) -> Delivery:
        """Return the function, to be run by `deliver`, that adds sampled tokens."""
        return self._loop, partial(self._extend, delta)

    def settle(self, result: Any) -> Delivery:
        """Return the function, to be run by `deliver`, that sets the result. An exception as result is raised in the
        caller."""
        return self._loop, partial(self._settle, result)

    def _extend(self, delta: Delta) -> None:
        self._deltas.append(delta)
        self._news.set()

    def _settle(self, result: Any) -> None:
        self._news.set()
        if self._future.done():
            return
        if isinstance(result, BaseException):
            self._future.set_exception(result)
        else:
            self._future.set_result(result)


def deliver(deliveries: list[Delivery]) -> None:
    """Run the functions of `deliveries` on their event loops, with one call into each loop; functions for a closed loop
    are dropped."""
    by_loop: dict[asyncio.AbstractEventLoop, list[Callable[[], None]]] = defaultdict(list)
    for loop, action in deliveries:
        by_loop[loop].append(action)
    for loop, actions in by_loop.items():
        try:
            loop.call_soon_threadsafe(_do, actions)
        except RuntimeError:
            if not loop.is_closed():
                raise


def _do(actions: list[Callable[[], None]]) -> None:
    for action in actions:
        action()
