"""Streamed answers of the token-level server: an engine's stream as server-sent events. Torch-free."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from sparring.engine import wire
from sparring.errors import SparringError
from sparring.generation import Completion, Delta

T = TypeVar("T")


class EventStream(Response):
    """Stream of an engine as server-sent events. The first piece is already requested. The head is sent at once, so
    that a client with the head knows that the engine has the request."""

    def __init__(
        self,
        pieces: AsyncIterator[Delta | Completion],
        first: asyncio.Future[Any],
        ended: Callable[[str | Completion], None],
    ) -> None:
        super().__init__(media_type=wire.EVENTS)
        del self.headers["content-length"]
        self._pieces, self._first, self._ended = pieces, first, ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until the end of the stream, or until the client disconnects."""
        try:
            await unless_left(receive, self._tell(send))
        except ClientDisconnect:
            self._ended("left")

    async def _tell(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self._event_bytes()) as events:
            async for data, more in events:
                await send({"type": "http.response.body", "body": data, "more_body": more})

    async def _event_bytes(self) -> AsyncGenerator[tuple[bytes, bool], None]:
        """Yield each event's bytes, and whether more events follow."""
        try:
            async with aclosing(self._pieces):  # type: ignore[type-var]
                piece = await self._first
                while not isinstance(piece, Completion):
                    yield wire.event("delta", piece), True
                    piece = await anext(self._pieces)
            self._ended(piece)
            yield wire.event("completion", piece), False
        except SparringError as error:
            self._ended(type(error).__name__)
            yield wire.event("error", wire.problem(error)), False


async def unless_left(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`. If the client disconnects, cancel `work` and raise ClientDisconnect."""
    task, departure = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((task, departure), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for waiting in (task, departure):
            waiting.cancel()
            with suppress(asyncio.CancelledError, SparringError):
                await waiting


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
