"""HTTP server for the sessions of rollouts. Each session has an endpoint with a key of its own: a `Door`.

    async with open_door(episode.session()) as door:
        client = openai.AsyncOpenAI(base_url=f"{door.url}/v1", api_key=door.key)

The key selects the session, and expires when the endpoint closes; for rewards, it expires when the rollout is scored.
One server answers for all open endpoints of an event loop, and runs while an endpoint is open. If the connection of a
request breaks, its reply is still sampled to the end, because clients retry: the retry gets that reply.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route, Router
from starlette.types import ASGIApp

from sparring.errors import BadInput, SparringError
from sparring.gateway.body_reader import CallReader, Overflow, Room, read_tool_call
from sparring.gateway.connection import PING_S, ExchangeResponse, empty_response
from sparring.gateway.dialects.chat_completions import ChatCompletions
from sparring.gateway.dialects.dialect import ClientError, ClientRequest, Dialect
from sparring.gateway.dialects.gemini import Gemini
from sparring.gateway.dialects.messages import Messages
from sparring.gateway.dialects.responses import Responses
from sparring.gateway.exchange import Exchanges, is_retried
from sparring.gateway.hosts import at_home, shows_key
from sparring.gateway.keys import PATH, KeyTable, key_of, wrong_key
from sparring.gateway.models import ModelTable, google_entry, openai_entry
from sparring.gateway.openapi import document
from sparring.gateway.refusals import (
    Answer,
    Endpoint,
    Misdirected,
    answering_misdirected,
    client_error,
    dialect_of,
    foreign_page_refusal,
    json_response,
    no_endpoint,
    retry_headers,
    with_request_ids,
)
from sparring.gateway.rewards import RewardRoutes
from sparring.gateway.serving import LocalServer, listen_on, server_settings
from sparring.gateway.tool_server import ToolCalls, answer_tools
from sparring.gateway.workers import RunKeys, WorkerRoutes, reachable_host, refuse_program
from sparring.protocols import Session, ToolHost

NOTED = "x-sparring-noted"
"""Header of a response that lists request fields without effect."""

DIALECTS: tuple[Dialect, ...] = (ChatCompletions(), Messages(), Responses(), Gemini(), Gemini(streams=True))


@dataclass(eq=False, kw_only=True, slots=True)
class Door:
    """Endpoint of one session: a URL and an API key.

    Attributes:
        url: URL of the server, without a path.
        key: API key of the client.
        session: session of the policy.
        room: maximum size of a prompt of the policy.
        models: models that the client may name, the policy among them.
        exchanges: exchanges of the client's requests.
        reader: reader of the client's requests.
        tools: tools of the world, served by MCP at `/mcp`; None if the world has no tools.
        calls: calls of the tools of the world.
        reward_key: key for external rewards of the rollout; empty if the run takes no rewards.
        ping_s: interval of keep-alive events on a stream, in seconds.
        turned_away: number of the server's requests with unknown keys up to the opening of this door.
    """

    url: str
    key: str
    session: Session
    room: Room
    models: ModelTable
    exchanges: Exchanges
    reader: CallReader
    tools: ToolHost | None = None
    calls: ToolCalls = field(default_factory=ToolCalls)
    reward_key: str = ""
    ping_s: float = PING_S
    turned_away: int = 0


class Gateway:
    """Server of the session endpoints (`Door`) that are open on one event loop.

    Attributes:
        address: address of `sparring gateway`, the only one at which clients reach this run; empty without a gateway.
        there: event that is set while `sparring gateway` is connected; opening a door waits for this event.
        workers: endpoints of external workers.
    """

    def __init__(self) -> None:
        self.address = ""
        self.there = asyncio.Event()
        self._doors: KeyTable[Door] = KeyTable()
        self._rewards = RewardRoutes(self._doors)
        self.workers = WorkerRoutes()
        self._kept = False
        self._server: LocalServer | None = None
        self._serving: asyncio.Task[None] | None = None
        self._url = ""
        self._changing = asyncio.Lock()
        self._turned_away = (0, "")  # number of requests with unknown keys, and the last refusal

    async def open(
        self,
        session: Session,
        models: Mapping[str, Session | str] = {},
        leave_out: Sequence[str] = (),
    ) -> Door:
        """Open the endpoint of a session, and start the server if it does not run."""
        table = ModelTable(session, models)
        if self.address:
            await self.there.wait()
        async with self._changing:
            if self.address:
                self._url = self.address
            elif self._server is None:
                await self._start()
            key = f"sk-{secrets.token_urlsafe(24)}"
            room, exchanges = Room(context=session.max_context, bytes=session.max_prompt_bytes), Exchanges(table)
            door = self._doors[key] = Door(
                url=self._url,
                key=key,
                session=session,
                room=room,
                models=table,
                exchanges=exchanges,
                reader=CallReader(room, exchanges, frozenset(leave_out)),
                turned_away=self._turned_away[0],
            )
            rewards = session.rewards
            if rewards is not None and not rewards.closed:
                door.reward_key = f"rk-{secrets.token_urlsafe(24)}"
                for key in (door.reward_key, door.key)[: 1 + rewards.by_sampler]:
                    self._rewards.open(key, rewards, session.conversation)
                    rewards.when_closed(partial(self._close_rewards, key))
            return door

    async def shut(self, door: Door, *, drop: bool = False) -> None:
        """Close an endpoint. The last one stops the server, unless a rollout waits for rewards or `open_outside` lasts.

        Args:
            drop: whether running replies are cancelled; a repeated request is then the same turn. Otherwise running
                replies end with the tokens sampled so far, which are recorded.
        """
        self._doors.pop(door.key)
        number, reason = self._turned_away
        if number > door.turned_away and not door.session.has_turn and not door.exchanges:
            door.session.refuse(f"meanwhile the gateway turned a client away: {reason}")
        under_way = door.exchanges.under_way
        for exchange in under_way:
            if drop:
                exchange.sampling.cancel()
            else:
                await exchange.end()
        await asyncio.gather(*(exchange.sampling for exchange in under_way), return_exceptions=True)
        await door.calls.end(drop=drop)
        await self._stop_unused()

    async def _close_rewards(self, key: str) -> None:
        self._rewards.close(key)
        await self._stop_unused()

    async def _stop_unused(self) -> None:
        async with self._changing:
            if not self._doors and not self._rewards.awaits and not self._kept:
                await self._stop()

    @asynccontextmanager
    async def open_outside(self, keys: RunKeys, address: str, lease_s: float, gateway: str = "") -> AsyncIterator[str]:
        """Answer external programs that have the run's keys, while the context lasts; yields the address.

        When the context ends, waiting claims fail with `RunOver`, or with `RunStopped` after an error, since another
        process may resume the run.

        Args:
            lease_s: seconds until a worker's lease expires.
            gateway: address of `sparring gateway`, which replaces this server; empty without a gateway.
        """
        host, _, port = address.rpartition(":")
        if not gateway:
            async with self._changing:
                await self._start(host.strip("[]"), int(port))
        self._kept, self._rewards.run_key = True, keys.reward
        self.workers.open(keys.worker, lease_s, gateway)
        try:
            with self.workers.attending():
                yield gateway or self._url
        finally:
            self._kept, self._rewards.run_key = False, ""
            await self._stop_unused()

    async def _start(self, host: str = "127.0.0.1", port: int = 0) -> None:
        listening = listen_on(host, port)
        self._url = f"http://{reachable_host(host)}:{listening.getsockname()[1]}"
        self._server = LocalServer(server_settings(self.application()))
        self._serving = asyncio.get_running_loop().create_task(self._server.serve(sockets=[listening]))

    async def _stop(self) -> None:
        server, serving, self._server, self._serving = self._server, self._serving, None, None
        if server is not None and serving is not None:
            server.should_exit = True
            await serving

    def application(self) -> ASGIApp:
        """Return the ASGI application."""
        posted: dict[str, Answer] = {
            path: partial(self._answer, dialect) for dialect in DIALECTS for path in _paths(dialect)
        }
        posted[Messages.path + "/count_tokens"] = partial(self._count, Messages(), "input_tokens")
        for version in ("v1beta", "v1"):
            posted[f"/{version}/models/{{model}}:countTokens"] = partial(self._count, Gemini(), "totalTokens")
        routes: list[Route] = [Endpoint(path, endpoint, methods=["POST"]) for path, endpoint in posted.items()]
        routes.append(Endpoint(Responses.path, self._no_socket, methods=["GET"]))
        for version in ("v1beta", "v1"):
            routes.append(Endpoint(f"/{version}/models", self._models))
            routes.append(Endpoint(f"/{version}/models/{{name:path}}", self._model))
        outside: dict[str, Answer] = {"/v1/rewards": self._rewards.answer, **self.workers.answers()}
        routes += [Endpoint(path, answer, methods=["POST"], refuse=refuse_program) for path, answer in outside.items()]
        routes.append(Endpoint("/mcp", self._tools, methods=["GET", "POST", "DELETE"], refuse=_refuse_tools))
        routes += [Endpoint("/health", self._health), Endpoint("/openapi.json", self._openapi)]
        behind_key = Mount(PATH, app=Router(routes, default=no_endpoint))
        guarded = at_home(Router([*routes, behind_key], default=no_endpoint), foreign_page_refusal, keyed=shows_key)
        return with_request_ids(answering_misdirected(guarded, self._record_misdirected))

    async def _count(self, dialect: Dialect, field: str, request: Request) -> Response:
        """Count the tokens of a prompt. `field` is the name of the count in the response."""
        try:
            door = self.door(key_of(request))
            client_request, _ = await door.reader.read(dialect, request)
            count = await door.exchanges.count(client_request)
        except SparringError as error:
            self._record_refusal(request, error)
            raise
        return json_response({field: count})

    async def _models(self, request: Request) -> Response:
        models = self.door(key_of(request)).models
        return json_response(models.list_for_google() if _is_googles(request) else models.list_for_openai())

    async def _model(self, request: Request) -> Response:
        name = request.path_params["name"]
        try:
            self.door(key_of(request)).models.session(name)
        except SparringError as error:
            self._record_refusal(request, error)
            raise
        return json_response(google_entry(name) if _is_googles(request) else openai_entry(name))

    async def _no_socket(self, request: Request) -> Response:
        """Refuse a WebSocket; after this status clients switch to HTTP at once."""
        error = ClientError(status=426, message="expected POST, got a WebSocket; send requests by POST")
        return json_response(Responses().error(error), 426)

    async def _tools(self, request: Request) -> Response:
        door = self.door(key_of(request))
        data = await read_tool_call(request, door.room)
        return await answer_tools(door.tools, door.calls, request, data)

    async def _health(self, request: Request) -> Response:
        return json_response({})

    async def _openapi(self, request: Request) -> Response:
        return json_response(document())

    async def _answer(self, dialect: Dialect, request: Request) -> Response:
        """Return the response to a request for a reply. The response reads a new exchange, or the exchange that the
        request repeats.
        """
        door = self.door(key_of(request))
        try:
            client_request, digest = await door.reader.read(dialect, request)
            client_request = _with_label(client_request, door.models)
            session = door.models.session(client_request.model)
        except Overflow as limit:
            door.exchanges.overflow(limit)
            raise
        except BadInput as error:
            door.exchanges.refuse(str(error))
            raise
        headers = {NOTED: ", ".join(client_request.noted)} if client_request.noted else {}
        if client_request.samples_nothing:
            return empty_response(dialect, client_request, door.exchanges.hear(client_request), headers)
        retried = is_retried(request.scope["headers"])
        exchange = door.exchanges.begin(digest, retried=retried, wanted=client_request)
        return ExchangeResponse(
            exchange,
            dialect,
            client_request,
            session.bytes_of,
            headers=headers,
            ping_s=door.ping_s,
        )

    def _record_misdirected(self, error: Misdirected) -> None:
        self._record_refusal(Request(error.scope), error)

    def _record_refusal(self, request: Request, error: SparringError) -> None:
        """Record in the session of a request's key that the request, which asked for no reply, was refused."""
        with suppress(SparringError):
            self.door(key_of(request)).exchanges.refuse(str(error), misdirected=True)

    def door(self, key: str) -> Door:
        """Return the open endpoint with this key.

        Raises:
            WrongKey: the key belongs to no open endpoint.
        """
        door = self._doors.get(key)
        if door is None:
            error = wrong_key("one of a rollout that is over, or of none")
            self._turned_away = (self._turned_away[0] + 1, str(error))
            raise error
        return door


_GATEWAYS: WeakKeyDictionary[asyncio.AbstractEventLoop, Gateway] = WeakKeyDictionary()


def gateway_here() -> Gateway:
    """Return the gateway of the running event loop."""
    return _GATEWAYS.setdefault(asyncio.get_running_loop(), Gateway())


@asynccontextmanager
async def open_door(
    session: Any,
    *,
    models: Mapping[str, Session | str] = {},
    leave_out: Sequence[str] = (),
    gateway: Gateway | None = None,
) -> AsyncIterator[Door]:
    """Open the endpoint of a session for as long as the context lasts, on the running event loop.

    Args:
        models: other model names of the client, each with its session or with the name of another entry, as in
            `{"claude-*": "policy"}`.
        leave_out: types of vendor-hosted tools, such as `web_search`, that are dropped from requests instead of
            refused.
        gateway: gateway that opens the endpoint; None: the gateway of the event loop.

    Raises:
        BadInput: the table of models is invalid.
    """
    gateway = gateway or gateway_here()
    door = await gateway.open(session, models, leave_out)
    try:
        yield door
    except BaseException:
        await gateway.shut(door, drop=True)
        raise
    await gateway.shut(door)


def _refuse_tools(request: Request, error: SparringError) -> Response:
    status = client_error(error).status
    return Response(str(error), status_code=status, headers=retry_headers(status))


def _is_googles(request: Request) -> bool:
    return isinstance(dialect_of(request.scope), Gemini)


def _with_label(client_request: ClientRequest, models: ModelTable) -> ClientRequest:
    """Return a request with the label of its model, unless its client gave a label. Raises UnknownModel."""
    label, evidence = models.label(client_request.model), client_request.evidence
    if label is None or evidence.label is not None:
        return client_request
    return replace(client_request, evidence=replace(evidence, label=label))


def _paths(dialect: Dialect) -> tuple[str, ...]:
    """Return the paths of a dialect; clients of Google use two versions of each path."""
    return (dialect.path, dialect.path.replace("/v1beta/", "/v1/")) if isinstance(dialect, Gemini) else (dialect.path,)
