"""Gateway's end of the link to a run: doors whose exchanges live in the run's process."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from sparring.errors import InfraError, LimitReached, SparringError
from sparring.gateway.connection import while_connected
from sparring.gateway.dialects.dialect import ClientRequest
from sparring.gateway.exchange import ReadExchange
from sparring.gateway.keys import KeyTable, WrongKey, key_of
from sparring.gateway.link import (
    METHODS,
    SOCKET,
    BeginForm,
    CallForm,
    DoorForm,
    EndForm,
    ExchangeForm,
    KeyForm,
    Line,
    Word,
    decode,
    encode,
)
from sparring.gateway.link_server import ERROR
from sparring.gateway.models import ModelTable
from sparring.gateway.reading import AnsweredDoor, read_body, read_tool_call
from sparring.gateway.rewards import MOST_BYTES
from sparring.gateway.serving import WHEN_BROKEN
from sparring.gateway.tool_server import READER
from sparring.types import Message

OF_CONNECTION = frozenset(
    (b"connection", b"content-length", b"date", b"host", b"server", b"transfer-encoding", READER.encode())
)
"""Headers that belong to one connection and are not passed on."""

REMEMBERED = 4096
"""Maximum number of doors that are cached, to avoid a request to the run's process."""


class RemoteModel:
    """Model whose session is in the run's process. It only knows the bytes of the ids in its replies."""

    def __init__(self, spelled: dict[int, bytes]) -> None:
        self._spelled = spelled

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of a token id, which may be a part of a character."""
        return self._spelled[token]


class _Reports:
    """Reports to the run's process, which later requests wait for."""

    def __init__(self) -> None:
        self._sending: set[asyncio.Task[None]] = set()

    @property
    def pending(self) -> tuple[asyncio.Task[None], ...]:
        """Reports that have not arrived yet."""
        return tuple(self._sending)

    def send(self, report: Coroutine[Any, Any, None]) -> None:
        """Start to send a report."""
        sending = asyncio.get_running_loop().create_task(report)
        self._sending.add(sending)
        sending.add_done_callback(self._sending.discard)


class _RemoteAnswer:
    """Answer of the run's process for one connection of a client, with a report of whether the client received it."""

    def __init__(self, link: GatewayLink, reports: _Reports, reading: Coroutine[Any, Any, Any]) -> None:
        self.reader = secrets.token_hex(8)
        self._link, self._reports = link, reports
        self._there = asyncio.Event()  # set when the run's process has the request
        self._reading = asyncio.get_running_loop().create_task(reading)

    def deliver(self, delivered: bool | None) -> None:
        """Report to the run's process whether the client received the complete answer; None: unknown."""
        self._reports.send(self._end(delivered))

    async def _end(self, delivered: bool | None) -> None:
        await self._there.wait()  # or the report might arrive before the request
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        with suppress(InfraError):  # the answer ended with that process
            await self._link.post("end", EndForm(reader=self.reader, delivered=delivered))


class RemoteExchange(_RemoteAnswer, ReadExchange):
    """Exchange in the run's process, with the parts that this process has read.

    Args:
        exchanges: exchanges of its door.
        form: request; the exchange chooses its `reader`.
    """

    def __init__(self, exchanges: RemoteExchanges, form: ExchangeForm) -> None:
        ReadExchange.__init__(self)
        pending = exchanges.reports.pending
        _RemoteAnswer.__init__(self, exchanges.link, exchanges.reports, self._read(exchanges, form, pending))

    async def _read(self, exchanges: RemoteExchanges, form: ExchangeForm, before: Sequence[asyncio.Task[None]]) -> None:
        try:
            await asyncio.gather(*before)
            form = msgspec.structs.replace(form, reader=self.reader)
            async for line in exchanges.link.lines(form, self._there.set):
                exchanges.spelled.update(line.spelled or {})
                part = line.head or line.piece or line.reply
                if part is not None:
                    self._add(line.sample, part)
                self.error, self.over = line.error, line.over
        except SparringError as error:
            self.error = error
        finally:
            self._there.set()
            if not self.over and self.error is None:
                self.error = InfraError("the run's process ended before the answer did")
            self.over = True
            self._wake()


class RemoteExchanges:
    """Exchanges of one door in the run's process. Implements `DoorExchanges`.

    Args:
        link: link to that process.
        key: key of the door.

    Attributes:
        link: as above.
        spelled: bytes of the token ids in replies.
        reports: reports of connections that stopped reading.
    """

    def __init__(self, link: GatewayLink, key: str) -> None:
        self.link = link
        self.spelled: dict[int, bytes] = {}
        self.reports = _Reports()
        self._key = key

    def begin(self, request: bytes, *, retried: bool, wanted: ClientRequest) -> RemoteExchange:
        form = ExchangeForm(
            reader="",
            gateway=self.link.name,
            key=self._key,
            digest=request.hex(),
            retried=retried,
            wanted=replace(wanted, echo={}),
        )
        return RemoteExchange(self, form)

    async def count(self, wanted: ClientRequest) -> int:
        number: int = await self._call("count", replace(wanted, echo={}))
        return number

    async def refuse(self, reason: str, misdirected: bool = False) -> None:
        await self._call("refuse", reason, misdirected)

    async def overflow(self, limit: LimitReached) -> None:
        await self._call("overflow", limit)

    async def hear(self, wanted: ClientRequest) -> str:
        id: str = await self._call("hear", replace(wanted, echo={}))
        return id

    async def conversations(self, replies: Collection[str]) -> Mapping[str, Sequence[Message]]:
        recalled: dict[str, tuple[Message, ...]] = await self._call("conversations", tuple(replies))
        return recalled

    async def _call(self, method: str, *arguments: Any) -> Any:
        form = CallForm(key=self._key, arguments=msgspec.Raw(encode(arguments)))
        return decode(await self.link.post(method, form), METHODS[method][1])


class _ForwardedCall(_RemoteAnswer):
    """Request to the tools of a world that is passed on to the run's process."""

    def __init__(self, link: GatewayLink, reports: _Reports, request: Request, body: bytes) -> None:
        super().__init__(link, reports, self._read(request, body))

    async def answer(self) -> httpx.Response:
        """Wait for the complete response. Raises httpx.HTTPError if the run's process does not answer."""
        return await asyncio.shield(self._reading)

    async def _read(self, request: Request, body: bytes) -> httpx.Response:
        try:
            async with self._link.stream(request, body, self.reader) as answer:
                self._there.set()
                await answer.aread()
                return answer
        finally:
            self._there.set()


class _DeliveredResponse(Response):
    """Response of the run's process, with a report to that process of whether the client received it."""

    def __init__(self, answer: httpx.Response, deliver: Callable[[bool | None], None]) -> None:
        super().__init__(answer.content, status_code=answer.status_code, headers=_client_headers(answer))
        self._deliver, self._sent = deliver, False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        scope[WHEN_BROKEN] = self._when_broken
        await super().__call__(scope, receive, send)
        self._sent = True
        self._deliver(True)

    def _when_broken(self) -> None:
        if self._sent:
            self._deliver(None)


class GatewayLink:
    """Link of a gateway's process to the run of a folder. Implements `RunLink`.

    Args:
        folder: folder of the run.

    Attributes:
        name: id of this process.
    """

    def __init__(self, folder: Path) -> None:
        self.name = secrets.token_hex(8)
        self._folder = folder
        self._inside = os.open(folder, os.O_PATH | os.O_DIRECTORY)
        path = f"/proc/self/fd/{self._inside}/{SOCKET}"  # a socket's own path has at most 107 bytes
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        transport = httpx.AsyncHTTPTransport(uds=path, limits=limits)
        self._client = httpx.AsyncClient(base_url="http://run", transport=transport, timeout=None)
        self._doors: KeyTable[AnsweredDoor] = KeyTable()
        self._reports = _Reports()  # about calls of tools

    async def words(self) -> AsyncGenerator[Word]:
        """Take over from the previous gateway, and yield the run's words about this one, first `BEGUN`.

        Raises:
            InfraError: the run does not answer, or its process has ended.
        """
        form = encode(BeginForm(gateway=self.name))
        try:
            async with self._client.stream("POST", "/begin", content=form) as answer:
                async for line in answer.aiter_lines():
                    yield Word(line)
        except httpx.HTTPError as error:
            raise self._no_answer(error) from error

    async def door(self, key: str) -> AnsweredDoor:
        door = self._doors.get(key)
        if door is None:
            form = decode(await self.post("door", KeyForm(key=key)), DoorForm)
            exchanges = RemoteExchanges(self, key)
            model = RemoteModel(exchanges.spelled)
            if len(self._doors) >= REMEMBERED:
                self._doors.pop_oldest()
            door = self._doors[key] = AnsweredDoor(
                room=form.room,
                models=ModelTable(model, {name: entry or model for name, entry in form.models.items()}),
                exchanges=exchanges,
                leave_out=frozenset(form.leave_out),
                ping_s=form.ping_s,
            )
        return door

    async def post(self, name: str, form: msgspec.Struct) -> bytes:
        """Send a form and return the response.

        Raises:
            SparringError: the error that the run's process raised.
            InfraError: the run's process does not answer.
        """
        try:
            answer = await self._client.post(f"/{name}", content=encode(form))
        except httpx.HTTPError as error:
            raise self._no_answer(error) from error
        self._check(answer.status_code, answer.content)
        return answer.content

    async def lines(self, form: ExchangeForm, there: Callable[[], None]) -> AsyncIterator[Line]:
        """Yield the lines of an exchange as they arrive.

        Args:
            form: request.
            there: function that is called when the run's process has the request.

        Raises:
            SparringError: the error that the run's process raised.
            InfraError: the run's process does not answer, or another gateway replaced this one.
        """
        try:
            async with self._client.stream("POST", "/exchange", content=encode(form)) as answer:
                if answer.status_code != 200:
                    self._check(answer.status_code, await answer.aread())
                there()
                rest = b""
                async for chunk in answer.aiter_raw():
                    *texts, rest = (rest + chunk).split(b"\n")
                    for text in texts:
                        yield decode(text, Line)
        except httpx.HTTPError as error:
            raise self._no_answer(error) from error
        except WrongKey:
            self._doors.pop(form.key)
            raise

    async def forward(self, request: Request) -> Response:
        await self.post("known", KeyForm(key=key_of(request)))
        body = await read_body(request, MOST_BYTES)
        passed_on = self._client.request(**_forwarding_arguments(request), content=body)
        try:
            answer = await while_connected(request.receive, asyncio.ensure_future(passed_on))
        except httpx.HTTPError as error:
            raise self._no_answer(error) from error
        return Response(answer.content, status_code=answer.status_code, headers=_client_headers(answer))

    async def forward_to_tools(self, request: Request) -> Response:
        body = await read_tool_call(request, (await self.door(key_of(request))).room)
        await asyncio.gather(*self._reports.pending)
        passed_on = _ForwardedCall(self, self._reports, request, body)
        try:
            answer = await while_connected(request.receive, asyncio.ensure_future(passed_on.answer()))
        except ClientDisconnect:
            passed_on.deliver(False)
            raise
        except httpx.HTTPError as error:
            raise self._no_answer(error) from error
        if READER not in answer.headers:
            return Response(answer.content, status_code=answer.status_code, headers=_client_headers(answer))
        return _DeliveredResponse(answer, passed_on.deliver)

    def stream(self, request: Request, body: bytes, reader: str) -> AbstractAsyncContextManager[httpx.Response]:
        """Return the response to a request as a stream.

        Args:
            request: request that is passed on.
            body: body of the request.
            reader: id of the connection that reads the response.
        """
        values = _forwarding_arguments(request)
        values["headers"].append((READER.encode(), reader.encode()))
        return self._client.stream(**values, content=body)

    async def close(self) -> None:
        """Close the connections to the run."""
        await self._client.aclose()
        os.close(self._inside)

    def _check(self, status: int, body: bytes) -> None:
        if status == ERROR:
            raise decode(body, SparringError)
        if status != 200:
            raise InfraError(f"{self._folder}: status {status}: another gateway has followed this one")

    def _no_answer(self, error: Exception) -> InfraError:
        return InfraError(f"{self._folder}: the run does not answer ({type(error).__name__}: {error})")


def _forwarding_arguments(request: Request) -> dict[str, Any]:
    """Return the httpx arguments that repeat a request without its body."""
    headers = [(name, value) for name, value in request.headers.raw if name not in OF_CONNECTION]
    path = request.scope["raw_path"] + b"?" + request.scope["query_string"]  # an invalid host breaks `request.url`
    return {"method": request.method, "url": path.decode("latin-1"), "headers": headers}


def _client_headers(answer: httpx.Response) -> dict[str, str]:
    return {name: value for name, value in answer.headers.items() if name.encode() not in OF_CONNECTION}
