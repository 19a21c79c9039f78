"""Gateway's end of the link to a run: doors whose exchanges live in the run's process."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from sparring.errors import InfraError, LimitReached, SparringError
from sparring.gateway.connection import while_connected
from sparring.gateway.dialects.dialect import ClientRequest
from sparring.gateway.keys import KeyTable, WrongKey, key_of
from sparring.gateway.link import (
    SOCKET,
    BeginForm,
    CountForm,
    DoorForm,
    EndForm,
    ErrorForm,
    ExchangeForm,
    HearForm,
    KeyForm,
    Line,
    OverflowForm,
    RecallForm,
    RefusedForm,
    Word,
    decode,
    encode,
    error_form,
    error_of,
)
from sparring.gateway.link_server import ERROR
from sparring.gateway.models import ModelTable
from sparring.gateway.reading import Room, read_body, read_tool_call
from sparring.gateway.rewards import MOST_BYTES
from sparring.gateway.serving import WHEN_BROKEN
from sparring.gateway.tool_server import READER
from sparring.reply import ReplyPart, SampledReply
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


class RemoteExchange:
    """Exchange in the run's process, with the parts that this process has read. Implements `ReadExchange`."""

    def __init__(self, exchanges: RemoteExchanges, form: ExchangeForm) -> None:
        self.parts: list[tuple[int, ReplyPart]] = []
        self.error: SparringError | None = None
        self.over = False
        self.wakers: set[Callable[[], None]] = set()
        self._replies: dict[int, SampledReply] = {}
        self._exchanges, self._reader = exchanges, form.reader
        self._there = asyncio.Event()
        self._reading = asyncio.get_running_loop().create_task(self._read(form, exchanges.notes))

    @property
    def whole(self) -> list[SampledReply]:
        if self.error is not None:
            raise self.error
        return [self._replies[sample] for sample in sorted(self._replies)]

    def deliver(self, delivered: bool | None) -> None:
        self._exchanges.note(self._end(delivered))

    async def _end(self, delivered: bool | None) -> None:
        await self._there.wait()  # or the report might arrive before the request
        self._reading.cancel()
        await self._exchanges.end(EndForm(reader=self._reader, delivered=delivered))

    async def _read(self, form: ExchangeForm, notes: Sequence[asyncio.Task[None]]) -> None:
        try:
            async for line in self._exchanges.lines(form, notes, self._there.set):
                part = line.head or line.piece or line.reply
                if part is not None:
                    self._take(line.sample, part)
                self.error = None if line.error is None else error_of(line.error)
                self.over = line.over
        except SparringError as error:
            self.error = error
        finally:
            self._there.set()
            if not self.over and self.error is None:
                self.error = InfraError("the run's process ended before the answer did")
            self.over = True
            for wake in self.wakers:
                wake()

    def _take(self, sample: int, part: ReplyPart) -> None:
        if isinstance(part, SampledReply):
            self._replies[sample] = part
        self.parts.append((sample, part))
        for wake in self.wakers:
            wake()


class RemoteExchanges:
    """Exchanges of one door in the run's process. Implements `DoorExchanges`.

    Args:
        link: link to that process.
        key: key of the door.
        spelled: bytes of token ids, filled in by replies.
    """

    def __init__(self, link: GatewayLink, key: str, spelled: dict[int, bytes]) -> None:
        self._link, self._key, self._spelled = link, key, spelled
        self._notes: set[asyncio.Task[None]] = set()

    def begin(self, request: bytes, *, retried: bool, session: Any, wanted: ClientRequest) -> RemoteExchange:
        reader, digest = secrets.token_hex(8), request.hex()
        sent = replace(wanted, echo={})
        form = ExchangeForm(
            reader=reader, gateway=self._link.name, key=self._key, digest=digest, retried=retried, wanted=sent
        )
        return RemoteExchange(self, form)

    async def count(self, session: Any, wanted: ClientRequest) -> int:
        return int(await self._link.post("count", encode(CountForm(key=self._key, wanted=replace(wanted, echo={})))))

    async def refuse(self, session: Any, reason: str, *, misdirected: bool = False) -> None:
        form = RefusedForm(key=self._key, reason=reason, misdirected=misdirected)
        await self._link.post("refused", encode(form))

    async def overflow(self, limit: LimitReached) -> None:
        await self._link.post("overflow", encode(OverflowForm(key=self._key, error=error_form(limit))))

    async def hear(self, wanted: ClientRequest) -> str:
        form = HearForm(key=self._key, wanted=replace(wanted, echo={}))
        return (await self._link.post("hear", encode(form))).decode()

    async def conversations(self, models: Any, replies: Collection[str]) -> Mapping[str, Sequence[Message]]:
        form = RecallForm(key=self._key, replies=tuple(replies))
        found: dict[str, tuple[Message, ...]] = decode(
            await self._link.post("recall", encode(form)), dict[str, tuple[Message, ...]]
        )
        return found

    @property
    def notes(self) -> tuple[asyncio.Task[None], ...]:
        """Reports to the run's process that have not arrived yet."""
        return tuple(self._notes)

    async def lines(
        self, form: ExchangeForm, notes: Sequence[asyncio.Task[None]], there: Callable[[], None]
    ) -> AsyncIterator[Line]:
        """Yield the lines of an exchange.

        Args:
            form: request.
            notes: reports that must arrive before the request.
            there: function that is called when the run's process has the request.
        """
        await asyncio.gather(*notes)
        async for line in self._link.lines(form, there):
            self._spelled.update(line.spelled or {})
            yield line

    def note(self, noting: Coroutine[Any, Any, None]) -> None:
        """Start to send a report. Later requests wait for it."""
        note = asyncio.get_running_loop().create_task(noting)
        self._notes.add(note)
        note.add_done_callback(self._notes.discard)

    async def end(self, form: EndForm) -> None:
        """Report that a connection stopped reading."""
        try:
            await self._link.post("end", encode(form))
        except InfraError:  # the exchanges ended with that process
            return


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteDoor:
    """Door that is open in the run's process. Implements `AnsweredDoor`."""

    models: ModelTable[RemoteModel]
    leave_out: frozenset[str]
    exchanges: RemoteExchanges
    room: Room
    ping_s: float
    reading: asyncio.Lock = field(default_factory=asyncio.Lock)


class _ForwardedCall:
    """Request to the tools of a world that is passed on to the run's process."""

    def __init__(self, link: GatewayLink, request: Request, body: bytes) -> None:
        self._link, self._reader = link, secrets.token_hex(8)
        self._there = asyncio.Event()
        self._reading = asyncio.get_running_loop().create_task(self._read(request, body))

    async def answer(self) -> httpx.Response:
        """Wait for the complete response. Raises httpx.HTTPError if the run's process does not answer."""
        return await asyncio.shield(self._reading)

    def deliver(self, delivered: bool | None) -> None:
        """Report to the run's process whether the client received the complete response; None: unknown."""
        self._link.note(self._end(delivered))

    async def _read(self, request: Request, body: bytes) -> httpx.Response:
        try:
            async with self._link.stream(request, body, self._reader) as answer:
                self._there.set()
                await answer.aread()
                return answer
        finally:
            self._there.set()

    async def _end(self, delivered: bool | None) -> None:
        await self._there.wait()  # or the report might arrive before the request
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        with suppress(InfraError):  # the calls ended with that process
            await self._link.post("end", encode(EndForm(reader=self._reader, delivered=delivered)))


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
        self._doors: KeyTable[RemoteDoor] = KeyTable()
        self._notes: set[asyncio.Task[None]] = set()

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

    async def door(self, key: str) -> RemoteDoor:
        door = self._doors.get(key)
        if door is None:
            form = decode(await self.post("door", encode(KeyForm(key=key))), DoorForm)
            spelled: dict[int, bytes] = {}
            models = {name: RemoteModel(spelled) if entry is None else entry for name, entry in form.models.items()}
            if len(self._doors) >= REMEMBERED:
                self._doors.pop_oldest()
            door = self._doors[key] = RemoteDoor(
                models=ModelTable(RemoteModel(spelled), models),
                leave_out=frozenset(form.leave_out),
                exchanges=RemoteExchanges(self, key, spelled),
                room=form.room,
                ping_s=form.ping_s,
            )
        return door

    async def post(self, name: str, body: bytes) -> bytes:
        """Send a form and return the response.

        Raises:
            SparringError: the error that the run's process raised.
            InfraError: the run's process does not answer.
        """
        try:
            answer = await self._client.post(f"/{name}", content=body)
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
        await self.post("known", encode(KeyForm(key=key_of(request))))
        body = await read_body(request, MOST_BYTES)
        passed_on = self._client.request(**_forwarding_arguments(request), content=body)
        try:
            answer = await while_connected(request.receive, asyncio.ensure_future(passed_on))
        except httpx.HTTPError as error:
            raise self._no_answer(error) from error
        return Response(answer.content, status_code=answer.status_code, headers=_client_headers(answer))

    async def forward_to_tools(self, request: Request) -> Response:
        body = await read_tool_call(request, (await self.door(key_of(request))).room)
        await asyncio.gather(*self._notes)
        passed_on = _ForwardedCall(self, request, body)
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

    def note(self, noting: Coroutine[Any, Any, None]) -> None:
        """Start to send a report. Later requests to tools wait for it."""
        note = asyncio.get_running_loop().create_task(noting)
        self._notes.add(note)
        note.add_done_callback(self._notes.discard)

    async def close(self) -> None:
        """Close the connections to the run."""
        await self._client.aclose()
        os.close(self._inside)

    def _check(self, status: int, body: bytes) -> None:
        if status == ERROR:
            raise error_of(decode(body, ErrorForm))
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
    """Return the headers of a response that are passed on to the client."""
    return {name: value for name, value in answer.headers.items() if name.encode() not in OF_CONNECTION}
