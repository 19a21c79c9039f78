"""`WeightSender`: blocking requests to a server that take part in an update of its weights, within one time limit."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from typing import Any, NamedTuple

from sparring.engine import wire
from sparring.engine.adapters.connections import Connections, blocking
from sparring.errors import EngineError, WeightsError, boundary
from sparring.types import WeightRef
from sparring.weights.upload import Bucket

GRACE_S = 2.0
"""Seconds that the client waits longer than `engine.update.timeout_s`, so that the server can refuse a late update
first."""

CONNECT_S = 10.0
"""Seconds that a connection may take to open."""

MOST_ANSWER = 1 << 20
"""Maximum number of bytes of an answer; answers are short."""


class SentAnswer(NamedTuple):
    """Answer of a server; names of headers in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class WeightSender:
    """Sender of weights to one server. Implements `LinkServer`.

    Args:
        timeout_s: `engine.update.timeout_s`. All requests together may take `GRACE_S` longer, else WeightsError.
    """

    def __init__(self, url: str, headers: Mapping[str, str], timeout_s: float) -> None:
        self._url, self._headers, self._timeout_s = url, headers, timeout_s
        self._deadline = time.monotonic() + timeout_s + GRACE_S
        self._running: tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]] | None = None

    def sees(self, ref: WeightRef) -> None:
        self.post("sees", wire.encode(ref))

    def take(self, bucket: Bucket, data: Sequence[memoryview]) -> None:
        self._checked("bucket", self.ask("bucket", b"", data, {wire.BUCKET: wire.encode(bucket).decode()}))

    def post(self, name: str, body: bytes) -> SentAnswer:
        """Send JSON to an endpoint. Raises WeightsError if the server refuses the weights, or did not answer in time.
        Raises EngineError if the server is unreachable, or failed itself."""
        return self._checked(name, self.ask(name, body))

    def ask(
        self, name: str, body: bytes, large: Sequence[memoryview] = (), headers: Mapping[str, str] = {}
    ) -> SentAnswer:
        """Send a request to an endpoint, with `body` and then `large` as its body. Return the answer, which may be an
        error. Raises WeightsError if the server did not answer in time. Raises EngineError if the server is
        unreachable."""
        with boundary(EngineError, f"engine at {self._url}: {name}"):
            return blocking(self._answer(f"/v1/{name}", body, large, headers))

    def cancel(self) -> None:
        """End the request that another thread waits for, if any, and all later requests, with an error."""
        self._deadline = 0.0
        if self._running is not None:
            loop, request = self._running
            with suppress(RuntimeError):  # it has ended meanwhile, and its loop with it
                loop.call_soon_threadsafe(request.cancel)

    async def _answer(
        self, path: str, body: bytes, large: Sequence[memoryview], headers: Mapping[str, str]
    ) -> SentAnswer:
        request = asyncio.current_task()
        assert request is not None
        self._running = asyncio.get_running_loop(), request  # before the deadline is read, which `cancel` sets first
        with closing(Connections(self._url, {**self._headers, **headers}, connect_s=CONNECT_S)) as server:
            try:
                async with asyncio.timeout_at(self._deadline):
                    with await server.post(path, body, large) as answer:
                        return SentAnswer(answer.status, answer.headers, await answer.read(MOST_ANSWER))
            except (TimeoutError, asyncio.CancelledError):
                raise late(f"engine at {self._url}: weights", self._timeout_s) from None

    def _checked(self, name: str, answer: SentAnswer) -> SentAnswer:
        if answer.status != 200:
            raise wire.error_of(answer.status, answer.body, f"engine at {self._url}: {name}")
        return answer


def late(where: str, timeout_s: float) -> WeightsError:
    """Return the error of an update that was not acknowledged in time."""
    expected = f"expected an acknowledgement within engine.update.timeout_s = {timeout_s:g}"
    return WeightsError(f"{where}: {expected}, got none; which version it serves is unknown until it answers again")
