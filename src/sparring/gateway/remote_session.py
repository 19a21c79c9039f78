"""The gateway's end of its link to a run: doors whose exchanges live in the run's process."""

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
from sparring.gateway.connection import while_there
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
    raised,
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
"""Headers that say something of one connection alone."""

REMEMBERED = 4096
"""Doors that are there to be used again without asking the run's process."""


class RemoteModel:
    """Model whose session is in the run's process: the bytes of the ids that its replies had."""

    def __init__(self, spelled: dict[int, bytes]) -> None:
        self._spelled = spelled

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of one id of a reply, which may be a part of a character."""
        return self._spelled[token]


class RemoteExchange:
    """Exchange in the run's process, as this process has read it so far; implements `ReadExchange`."""

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
        """The replies, in order. Raises the error that stands in their place."""
        if self.error is not None:
            raise self.error
        return [self._replies[sample] for sample in sorted(self._replies)]

    def deliver(self, delivered: bool | None) -> None:
        """Tell the run's process whether the client got the answer to its end; None: nobody knows."""
        self._exchanges.note(self._end(delivered))

    async def _end(self, delivered: bool | None) -> None:
        await self._there.wait()  # or the note might come before the request
        self._reading.cancel()
        await self._exchanges.end(EndForm(reader=self._reader, delivered=delivered))

    async def _read(self, form: ExchangeForm, notes: Sequence[asyncio.Task[None]]) -> None:
        try:
            async for line in self._exchanges.lines(form, notes, self._there.set):
                part = line.head or line.piece or line.reply
                if part is not None:
                    self._take(line.sample, part)
                self.error = None if line.error is None else raised(line.error)
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
    """The exchanges of one door in the run's process; implements `DoorExchanges`.

    Args:
        link: to that process.
        key: of the door.
        spelled: bytes of ids, which replies bring.
    """

    def __init__(self, link: GatewayLink, key: str, spelled: dict[int, bytes]) -> None:
        self._link, self._key, self._spelled = link, key, spelled
        self._notes: set[asyncio.Task[None]] = set()

    def begin(self, request: bytes, *, retried: bool, session: Any, wanted: ClientRequest) -> RemoteExchange:
        """Return the exchange of a request, new or not: the run's process decides."""
        reader, digest = secrets.token_hex(8), request.hex()
        sent = replace(wanted, echo={})
        form = ExchangeForm(
            reader=reader, gateway=self._link.name, key=self._key, digest=digest, retried=retried, wanted=sent
        )
        return RemoteExchange(self, form)

    async def count(self, session: Any, wanted: ClientRequest) -> int:
        """Return the number of ids of a conversation."""
        return int(await self._link.post("count", encode(CountForm(key=self._key, wanted=replace(wanted, echo={})))))

    async def refuse(self, session: Any, reason: str, *, misdirected: bool = False) -> None:
        """Have the session in the run's process take note of a refusal."""
        form = RefusedForm(key=self._key, reason=reason, misdirected=misdirected)
        await self._link.post("refused", encode(form))

    async def overflow(self, limit: LimitReached) -> None:
        """Tell the run's process of a request that was refused unread."""
        await self._link.post("overflow", encode(OverflowForm(key=self._key, error=error_form(limit))))

    async def hear(self, wanted: ClientRequest) -> str:
        """Take note of a conversation in the run's process, where it outlives this one."""
        form = HearForm(key=self._key, wanted=replace(wanted, echo={}))
        return (await self._link.post("hear", encode(form))).decode()

    async def conversations(self, models: Any, replies: Collection[str]) -> Mapping[str, Sequence[Message]]:
        """Return conversations by the ids of their last replies; see `DoorExchanges.conversations`."""
        form = RecallForm(key=self._key, replies=tuple(replies))
        found: dict[str, tuple[Message, ...]] = decode(
            await self._link.post("recall", encode(form)), dict[str, tuple[Message, ...]]
        )
        return found

    @property
    def notes(self) -> tuple[asyncio.Task[None], ...]:
        """The notes under way."""
        return tuple(self._notes)

    async def lines(
        self, form: ExchangeForm, notes: Sequence[asyncio.Task[None]], there: Callable[[], None]
    ) -> AsyncIterator[Line]:
        """Yield the lines of an exchange.

        Args:
            form: the request.
            notes: that the run's process has to have before.
            there: called when the run's process has the request.
        """
        await asyncio.gather(*notes)
        async for line in self._link.lines(form, there):
            self._spelled.update(line.spelled or {})
            yield line

    def note(self, noting: Coroutine[Any, Any, None]) -> None:
        """Begin to note something that requests from now on wait for."""
        note = asyncio.get_running_loop().create_task(noting)
        self._notes.add(note)
        note.add_done_callback(self._notes.discard)

    async def end(self, form: EndForm) -> None:
        """Note that a connection no longer reads."""
        try:
            await self._link.post("end", encode(form))
        except InfraError:  # its exchanges ended with that process
            return


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteDoor:
    """Door that the run's process has opened. Implements `AnsweredDoor`."""

    models: ModelTable[RemoteModel]
    leave_out: frozenset[str]
    exchanges: RemoteExchanges
    room: Room
    ping_s: float
    reading: asyncio.Lock = field(default_factory=asyncio.Lock)


class _ForwardedCall:
    """Request to a world's tools that the run's process answers."""

    def __init__(self, link: GatewayLink, request: Request, body: bytes) -> None:
        self._link, self._reader = link, secrets.token_hex(8)
        self._there = asyncio.Event()
        self._reading = asyncio.get_running_loop().create_task(self._read(request, body))

    async def answer(self) -> httpx.Response:
        """Return the answer when it is whole. Raises httpx.HTTPError where there is none."""
        return await asyncio.shield(self._reading)

    def deliver(self, delivered: bool | None) -> None:
        """Tell the run's process whether the client got the answer to its end; None: nobody knows."""
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
        await self._there.wait()  # or the note might come before the request
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        with suppress(InfraError):  # its calls ended with that process
            await self._link.post("end", encode(EndForm(reader=self._reader, delivered=delivered)))


class _DeliveredResponse(Response):
    """Answer of the run's process, which hears whether the client got it."""

    def __init__(self, answer: httpx.Response, deliver: Callable[[bool | None], None]) -> None:
        super().__init__(answer.content, status_code=answer.status_code, headers=_kept(answer))
        self._deliver, self._sent = deliver, False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        scope[WHEN_BROKEN] = self._when_broken
        await super().__call__(scope, receive, send)
        self._sent = True
        self._deliver(True)

    def _when_broken(self) -> None:
        if self._sent:
            self._deliver(None)


class GatewayLink:
    """Link of a gateway's process to the run whose folder it was given. Implements `RunLink`.

    Args:
        folder: of the run.

    Attributes:
        name: of this process.
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
        """Take over from the gateway before; yield what the run says of this one, the first when it has begun.

        Raises:
            InfraError: the run does not answer, or its process has ended.
        """
        form = encode(BeginForm(gateway=self.name))
        try:
            async with self._client.stream("POST", "/begin", content=form) as answer:
                async for line in answer.aiter_lines():
                    yield Word(line)
        except httpx.HTTPError as error:
            raise self._gone(error) from error

    async def door(self, key: str) -> RemoteDoor:
        """Return the door of a key.

        Raises:
            WrongKey: there is none.
            InfraError: the run does not answer.
        """
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
        """Send a form and return the answer.

        Raises:
            SparringError: as the run's process raised it.
            InfraError: it does not answer.
        """
        try:
            answer = await self._client.post(f"/{name}", content=body)
        except httpx.HTTPError as error:
            raise self._gone(error) from error
        self._check(answer.status_code, answer.content)
        return answer.content

    async def lines(self, form: ExchangeForm, there: Callable[[], None]) -> AsyncIterator[Line]:
        """Yield the lines of an exchange as they come.

        Args:
            form: the request.
            there: called when the run's process has it.

        Raises:
            SparringError: as the run's process raised it.
            InfraError: it does not answer, or another gateway has followed this one.
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
            raise self._gone(error) from error
        except WrongKey:
            self._doors.pop(form.key)
            raise

    async def forward(self, request: Request) -> Response:
        """Pass a request on as it came, and return the answer. Where its client leaves, so does the request.

        Raises:
            BadInput: the body is too large.
            ClientDisconnect: the client left.
            InfraError: the run's process does not answer.
        """
        await self.post("known", encode(KeyForm(key=key_of(request))))
        body = await read_body(request, MOST_BYTES)
        passed_on = self._client.request(**_as_it_came(request), content=body)
        try:
            answer = await while_there(request.receive, asyncio.ensure_future(passed_on))
        except httpx.HTTPError as error:
            raise self._gone(error) from error
        return Response(answer.content, status_code=answer.status_code, headers=_kept(answer))

    async def forward_to_tools(self, request: Request) -> Response:
        """Pass a request to a world's tools on as it came; return the answer, whose end is told to the run's process.

        Raises:
            BadInput: the body is too large.
            ClientDisconnect: the client left; the run's process hears of it before the next request.
            InfraError: the run's process does not answer.
        """
        body = await read_tool_call(request, (await self.door(key_of(request))).room)
        await asyncio.gather(*self._notes)
        passed_on = _ForwardedCall(self, request, body)
        try:
            answer = await while_there(request.receive, asyncio.ensure_future(passed_on.answer()))
        except ClientDisconnect:
            passed_on.deliver(False)
            raise
        except httpx.HTTPError as error:
            raise self._gone(error) from error
        if READER not in answer.headers:
            return Response(answer.content, status_code=answer.status_code, headers=_kept(answer))
        return _DeliveredResponse(answer, passed_on.deliver)

    def stream(self, request: Request, body: bytes, reader: str) -> AbstractAsyncContextManager[httpx.Response]:
        """Return the answer to a request as it comes.

        Args:
            request: that is passed on.
            body: of it.
            reader: name of the connection that reads the answer.
        """
        values = _as_it_came(request)
        values["headers"].append((READER.encode(), reader.encode()))
        return self._client.stream(**values, content=body)

    def note(self, noting: Coroutine[Any, Any, None]) -> None:
        """Begin to note something that requests to tools wait for from now on."""
        note = asyncio.get_running_loop().create_task(noting)
        self._notes.add(note)
        note.add_done_callback(self._notes.discard)

    async def close(self) -> None:
        """Close the connections to the run."""
        await self._client.aclose()
        os.close(self._inside)

    def _check(self, status: int, body: bytes) -> None:
        if status == ERROR:
            raise raised(decode(body, ErrorForm))
        if status != 200:
            raise InfraError(f"{self._folder}: status {status}: another gateway has followed this one")

    def _gone(self, error: Exception) -> InfraError:
        return InfraError(f"{self._folder}: the run does not answer ({type(error).__name__}: {error})")


def _as_it_came(request: Request) -> dict[str, Any]:
    """Return a request without its body."""
    headers = [(name, value) for name, value in request.headers.raw if name not in OF_CONNECTION]
    path = request.scope["raw_path"] + b"?" + request.scope["query_string"]  # a host that is none breaks `request.url`
    return {"method": request.method, "url": path.decode("latin-1"), "headers": headers}


def _kept(answer: httpx.Response) -> dict[str, str]:
    """Return the headers of an answer that are its client's."""
    return {name: value for name, value in answer.headers.items() if name.encode() not in OF_CONNECTION}
