"""Run's end of the link to `sparring gateway`. Exchanges live here and survive the gateway's process.

    POST /begin      start of a gateway, which breaks the previous one's connections. It stays open.
    POST /door       description of a key's door.
    POST /exchange   answer to a request, one line per part.
    POST /end        end of a connection, with whether its client received the answer.
    POST /known      check of a key.
    POST /METHOD     call of one of the `METHODS` of a door's exchanges.

Requests for rewards, workers and the world's tools are passed on unchanged, and are answered by the endpoints of the
run's own server.

An answer that its client did not receive completely is a broken exchange, as in the run's own server: the same request,
through the next gateway, joins that exchange.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Mount

from sparring.errors import BadInput, SparringError, boundary
from sparring.gateway.exchange import Exchange
from sparring.gateway.keys import PATH, wrong_key
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
from sparring.gateway.reading import read_body
from sparring.gateway.refusals import Endpoint
from sparring.gateway.server import Gateway, gateway_here
from sparring.gateway.serving import MOST_SENT, LocalServer, server_settings
from sparring.gateway.tool_server import READER, CallResponse, RunningCall
from sparring.protocols import Session
from sparring.reply import ReplyHead, ReplyPart, SampledReply

T = TypeVar("T")

ERROR = 409
"""Status of a response whose body is an error."""

MOST_NOTE = 1 << 20
"""Maximum number of bytes of a request that names a key, a connection or a limit."""

OTHER_VERSION = "start run and gateway with one version of Sparring"


class _Reader:
    """Reader of an exchange for one connection of the gateway's process.

    Attributes:
        exchange: exchange that is read.
        left: whether the connection has ended.
        handed: whether the gateway was sent the complete answer.
    """

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self.left = False
        self.handed = False
        self._more = asyncio.Event()
        exchange.wakers.add(self._more.set)

    async def parts(self) -> AsyncIterator[tuple[int, ReplyPart]]:
        """Yield the parts as they arrive, until the exchange is over or the connection ends."""
        read = 0
        while not self.left:
            self._more.clear()
            for part in self.exchange.parts[read:]:
                read += 1
                yield part
            if self.exchange.over and read == len(self.exchange.parts):
                self.handed = True
                self.exchange.hand_on()
                return
            await self._more.wait()

    def leave(self, delivered: bool | None) -> None:
        """Stop reading, and record whether the client received the answer; None: unknown."""
        self.left = True
        self.exchange.wakers.discard(self._more.set)
        self.exchange.deliver(delivered)
        self._more.set()


class _CallReader:
    """Reader of the answer to a tool call for one connection of the gateway's process.

    Attributes:
        exchange: tool call.
    """

    def __init__(self, call: RunningCall) -> None:
        self.exchange = call

    @property
    def handed(self) -> bool:
        """True if the gateway may have the complete answer."""
        return self.exchange.running.done()

    def leave(self, delivered: bool | None) -> None:
        """Record whether the client received the answer; None: unknown."""
        self.exchange.deliver(delivered)


class LinkServer:
    """Server of a run for the gateway's process; it serves one gateway at a time.

    Args:
        gateway: gateway that has the doors.
        report: function that shows the user a sentence.
    """

    def __init__(self, gateway: Gateway, report: Callable[[str], None]) -> None:
        self._doors, self._door = gateway, gateway.door
        self._report = report
        self._gateway = ""
        self._over: asyncio.Future[Word | None] = asyncio.get_running_loop().create_future()
        self._readers: dict[str, _Reader | _CallReader] = {}
        self._read: WeakValueDictionary[str, Exchange | RunningCall] = WeakValueDictionary()

    def application(self) -> Starlette:
        """Return the ASGI application."""
        posts: dict[str, Callable[[Request], Any]] = {
            "begin": self._begin,
            "door": self._describe,
            "exchange": self._exchange,
            "end": self._end,
            "known": self._known,
            **{method: partial(self._call, method) for method in METHODS},
        }
        passed = self._doors.routes_of_run(hold=self._hold)
        own = [Endpoint(f"/{name}", answer, methods=["POST"], refuse=_refuse) for name, answer in posts.items()]
        return Starlette(routes=[*own, *passed, Mount(PATH, routes=passed)])

    async def _describe(self, request: Request) -> Response:
        door = self._door((await _form(request, KeyForm, MOST_NOTE)).key)
        left_out = tuple(sorted(door.leave_out))
        form = DoorForm(room=door.room, models=door.models.entries, leave_out=left_out, ping_s=door.ping_s)
        return Response(encode(form))

    async def _begin(self, request: Request) -> Response:
        self._gateway = (await _form(request, BeginForm, MOST_NOTE)).gateway
        while self._readers:
            reader = self._readers.popitem()[1]
            reader.leave(None if reader.handed else False)  # its client may have everything that the gateway had
        self.end(Word.FOLLOWED)
        self._over = asyncio.get_running_loop().create_future()
        return StreamingResponse(self._words(self._over), media_type="text/plain")

    async def _words(self, over: asyncio.Future[Word | None]) -> AsyncIterator[str]:
        self._report("a gateway answers programs")
        self._doors.workers.go_on()
        self._doors.there.set()
        try:
            yield f"{Word.BEGUN}\n"
            word = await asyncio.shield(over)
            if word is not None:
                yield f"{word}\n"
        finally:
            if not over.done():
                self._doors.workers.pause()
                self._doors.there.clear()
                self._report("the gateway has ended; programs wait for the next one")

    def end(self, word: Word | None) -> None:
        """Tell the gateway that it no longer serves the run. `word` None: this process ends, and another may resume the
        run."""
        if not self._over.done():
            self._over.set_result(word)

    async def _exchange(self, request: Request) -> Response:
        form = await _form(request, ExchangeForm)
        self._gateway = self._gateway or form.gateway  # the gateway was started before this process
        if form.gateway != self._gateway:
            return Response(status_code=410)  # from a gateway that another replaced
        door = self._door(form.key)
        session = door.models.session(form.wanted.model)
        exchange = door.exchanges.begin(bytes.fromhex(form.digest), retried=form.retried, wanted=form.wanted)
        reader = self._readers[form.reader] = _Reader(exchange)
        spelling = session if form.wanted.logprobs else None
        return StreamingResponse(_lines(reader, spelling), media_type="application/x-ndjson")

    async def _end(self, request: Request) -> Response:
        form = await _form(request, EndForm, MOST_NOTE)
        reader = self._readers.pop(form.reader, None)
        if reader is not None:
            self._read[form.reader] = reader.exchange
            reader.leave(form.delivered)
        elif form.delivered is None and form.reader in self._read:
            self._read[form.reader].deliver(None)
        return Response()

    def _hold(self, request: Request, response: CallResponse) -> None:
        """Keep the answer to a tool call until the gateway reports whether its client received it."""
        response.reader = request.headers[READER]
        self._readers[response.reader] = _CallReader(response.call)

    async def _call(self, method: str, request: Request) -> Response:
        form = await _form(request, CallForm)
        arguments = _decode(request, form.arguments, METHODS[method][0])
        return Response(encode(await getattr(self._door(form.key).exchanges, method)(*arguments)))

    async def _known(self, request: Request) -> Response:
        if not self._doors.knows((await _form(request, KeyForm, MOST_NOTE)).key):
            raise wrong_key("one of a rollout that is over, or of none")
        return Response()


@asynccontextmanager
async def linked(folder: Path, address: str, report: Callable[[str], None] = lambda text: None) -> AsyncIterator[None]:
    """Serve the gateway's process on a socket in the run's folder while the context lasts.

    Doors that are opened meanwhile have the gateway's address. If the context ends with an error, the gateway keeps
    waiting for the process that resumes the run.

    Args:
        folder: folder of the run.
        address: address of `sparring gateway` for programs.
        report: function that shows the user a sentence.
    """
    gateway, path = gateway_here(), folder / SOCKET
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listening:
        inside = os.open(folder, os.O_PATH | os.O_DIRECTORY)
        before = os.umask(0o177)
        try:
            listening.bind(f"/proc/self/fd/{inside}/{SOCKET}")  # a socket's own path has at most 107 bytes
        finally:
            os.umask(before)
            os.close(inside)
        listening.listen(2048)
        link = LinkServer(gateway, report)
        server = LocalServer(server_settings(link.application()))
        serving = asyncio.get_running_loop().create_task(server.serve(sockets=[listening]))
        gateway.address = address.rstrip("/")
        report(
            f"programs reach this run at {address}; answer them there: sparring gateway {folder} --host ... --port ..."
        )
        try:
            with gateway.workers.attending():  # waiting claims are answered before the gateway ends
                yield
            link.end(Word.OVER)
        finally:
            link.end(None)
            gateway.address = ""
            gateway.there.clear()
            server.should_exit = True
            await serving
            path.unlink(missing_ok=True)


async def _form(request: Request, kind: type[T], most_bytes: int = MOST_SENT) -> T:
    """Read the body of a gateway's request.

    Raises:
        BadInput: the body is not a form of this kind, or too long.
    """
    form: T = _decode(request, await read_body(request, most_bytes), kind)
    return form


def _decode(request: Request, data: bytes | msgspec.Raw, kind: Any) -> Any:
    with boundary(BadInput, f"POST {request.scope['path']}", f"a {kind.__name__}", OTHER_VERSION):
        return decode(data, kind)


async def _lines(reader: _Reader, session: Session | None) -> AsyncIterator[bytes]:
    """Yield an exchange as lines. With `session`, a reply's line has the bytes of its ids."""
    async for sample, part in reader.parts():
        if isinstance(part, SampledReply):
            spelled = None if session is None else {token: session.bytes_of(token) for token in part.tokens}
            line = Line(sample=sample, reply=part, spelled=spelled)
        elif isinstance(part, ReplyHead):
            line = Line(sample=sample, head=part)
        else:
            line = Line(sample=sample, piece=part)
        yield encode(line) + b"\n"
    yield encode(Line(over=True, error=reader.exchange.error)) + b"\n"


def _refuse(request: Request, error: SparringError) -> Response:
    return Response(encode(error), status_code=ERROR)
