"""Calls to a vLLM server from an event loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import httpx

from sparring.engine.adapters.vllm_server import VllmServer
from sparring.errors import EngineError

MOMENT_S = 1.0
"""Seconds that a check waits for an answer; the next check may get an answer that arrives later."""


class VllmClient:
    """Client of a vLLM server, for one event loop."""

    def __init__(self, server: VllmServer) -> None:
        self._server = server
        self._client: httpx.AsyncClient | None = None

    async def post(self, address: str, body: Mapping[str, Any] | None = None) -> Any:
        """Send one request and return the decoded answer. Raises EngineError if the request failed; if the server has
        ended, the message includes the end of the server's log."""
        return await self._asked("POST", address, body)

    async def get(self, address: str) -> Any:
        """Send a GET request and return the decoded answer. Raises as `post`."""
        return await self._asked("GET", address, None)

    async def _asked(self, method: str, address: str, body: Mapping[str, Any] | None) -> Any:
        try:
            answer = await self._http().request(method, address, json=body)
        except httpx.TransportError as error:
            raise self._gone(address, error) from error
        if answer.status_code != httpx.codes.OK:
            raise EngineError(f"vLLM {address}: expected status 200, got {answer.status_code}: {answer.text[:500]}")
        return answer.json() if answer.content else None

    async def events(self, address: str, body: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the pieces of a streamed answer. Raises as `post`."""
        streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
        try:
            async with self._http().stream("POST", address, json=streamed) as answer:
                if answer.status_code != httpx.codes.OK:
                    raise EngineError(f"vLLM {address}: expected status 200, got {await answer.aread()!r}")
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        event = json.loads(line.removeprefix("data: "))
                        if "error" in event:
                            raise EngineError(f"vLLM {address}: expected tokens, got {event['error']}")
                        yield event
                        await asyncio.sleep(0)  # buffered lines are read without a pause, so let other tasks run
        except httpx.TransportError as error:
            raise self._gone(address, error) from error

    async def close(self) -> None:
        """Close the connections. Safe to call twice."""
        if self._client is not None:
            client, self._client = self._client, None
            await client.aclose()

    def _http(self) -> httpx.AsyncClient:
        if self._client is None:
            self._client = httpx.AsyncClient(transport=self._server.transport, base_url="http://vllm", timeout=None)
        return self._client

    def _gone(self, address: str, error: Exception) -> EngineError:
        return EngineError(
            f"vLLM {address}: expected an answer, got {type(error).__name__}: {error}{self._server.ending()}"
        )


class StepWatch:
    """Watch of vLLM's engine, a process that answers only between two steps. A step may compile, so an answer may take
    up to `patience_s` seconds."""

    def __init__(self, client: VllmClient, patience_s: float) -> None:
        self._client, self._patience_s = client, patience_s
        self._question: asyncio.Task[Any] | None = None
        self._asked_s = 0.0

    async def check(self, *, updating: bool) -> None:
        """Ask the engine, unless an earlier question is open, and wait up to `MOMENT_S` for the answer. While the
        weights are `updating` an answer may take longer than a step. Raises EngineError if vLLM has ended or failed, or
        an answer takes too long."""
        question, now = self._question, asyncio.get_running_loop().time()
        if question is None or question.done():
            question = self._question = asyncio.create_task(self._client.get("/is_sleeping"))
            question.add_done_callback(_retrieve)
            self._asked_s = now
        elif updating:
            self._asked_s = now
        await asyncio.wait((question,), timeout=MOMENT_S)
        if question.done():
            question.result()
        elif now - self._asked_s > self._patience_s:
            limit = f"engine.vllm.stalled_s = {self._patience_s:g}"
            raise EngineError(f"vLLM's engine: expected the end of a step within {limit}, got no answer")

    def close(self) -> None:
        """Cancel the open question."""
        if self._question is not None:
            self._question.cancel()


def _retrieve(question: asyncio.Task[Any]) -> None:
    """Take the error of a question that nobody waits for any more, so that asyncio does not report the error."""
    if not question.cancelled():
        question.exception()
