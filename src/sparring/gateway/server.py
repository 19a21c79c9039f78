"""HTTP server for the sessions of rollouts, each under its own key.

    async with open_door(episode.session()) as door:
        client = openai.AsyncOpenAI(base_url=f"{door.url}/v1", api_key=door.key)

The key selects the session. It expires when the door closes; for rewards it expires when the rollout is scored. One
server answers for all open doors of an event loop, and runs while a door is open. If the connection of a request
breaks, its reply is still sampled to the end, because clients retry: the retry gets that reply.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Mount, Route, Router
from starlette.types import ASGIApp

from sparring.errors import BadInput, SparringError
from sparring.gateway.connection import PING_S, ExchangeResponse, empty_response
from sparring.gateway.dialects.chat_completions import ChatCompletions
from sparring.gateway.dialects.dialect import ClientError, ClientRequest, Dialect
from sparring.gateway.dialects.gemini import Gemini
from sparring.gateway.dialects.messages import Messages
from sparring.gateway.dialects.responses import Responses
from sparring.gateway.exchange import Exchanges, is_retried
from sparring.gateway.hosts import at_home, shows_key
from sparring.gateway.keys import PATH, KeyTable, key_of, wrong_key
from sparring.gateway.link import AnsweredDoor, RunLink
from sparring.gateway.models import ModelTable, google_entry, openai_entry
from sparring.gateway.openapi import document
from sparring.gateway.reading import Overflow, Room, read_call, read_tool_call
from sparring.gateway.refusals import (
    Endpoint,
    Misdirected,
    answering_misdirected,
    client_error,
    dialect_of,
    foreign_page_refusal,
    no_endpoint,
    refusal_response,
    retry_headers,
    with_request_ids,
)
from sparring.gateway.rewards import RewardRoutes
from sparring.gateway.rewards import error_response as word_refused
from sparring.gateway.serving import LocalServer, server_settings
from sparring.gateway.tool_server import CallResponse, ToolCalls, answer_tools
from sparring.gateway.workers import RunKeys, WorkerRoutes, listen_on, reachable_host
from sparring.protocols import Session, ToolHost

NOTED = "x-sparring-noted"
"""Header of a response that lists request fields without effect."""

Answer = Callable[[Request], Awaitable[Response]]

DIALECTS: tuple[Dialect, ...] = (ChatCompletions(), Messages(), Responses(), Gemini(), Gemini(streams=True))


@dataclass(eq=False, slots=True)
class Door:
    """Endpoint of one session: a URL and an API key.

    Attributes:
        url: URL of the server, without a path.
        key: API key of the client.
        reward_key: key for rewards of the rollout from outside; empty if the run takes no rewards.
        turned_away: number of requests with unknown keys when the door was opened.
        session: session of the policy.
        room: maximum size of a prompt of the policy.
        models: models that the client may name, the policy among them.
        leave_out: types of vendor-hosted tools that are dropped from requests instead of refused.
        exchanges: exchanges of its client's requests.
        tools: tools of the world, served by MCP at `/mcp`; None if the world has no tools.
        calls: calls of the tools of the world.
        ping_s: interval of keep-alive events on a stream, in seconds.
        reading: lock that is held while a request is read, so that requests are read in order of arrival.
    """

    url: str
    key: str
    session: Session
    room: Room
    models: ModelTable[Session]
    leave_out: frozenset[str] = frozenset()
    exchanges: Exchanges = field(init=False)
    tools: ToolHost | None = None
    calls: ToolCalls = field(default_factory=ToolCalls)
    ping_s: float = PING_S
    reward_key: str = ""
    turned_away: int = 0
    reading: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        self.exchanges = Exchanges(self.session)


class Gateway:
    """Server of the doors that are open on one event loop.

    Args:
        run: link to the process that has the doors; None if they are opened in this process.

    Attributes:
        address: address of `sparring gateway`, which then answers for these doors instead of a server in this process;
            empty without it.
        there: event that is set while `sparring gateway` is connected; doors wait for it.
        workers: endpoints of external workers.
    """

    def __init__(self, run: RunLink | None = None) -> None:
        self.address = ""
        self.there = asyncio.Event()
        self._run = run
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
        """Open a door to a session, and start the server if it does not run.

        Args:
            session: session of the policy.
            models: other model names of the client, as in `ModelTable`.
            leave_out: types of vendor-hosted tools that are dropped from requests instead of refused.

        Raises:
            BadInput: the table of models is invalid.
        """
        table = ModelTable(session, models)
        if self.address:
            await self.there.wait()
        async with self._changing:
            if self.address:
                self._url = self.address
            elif self._server is None:
                await self._start()
            key = f"sk-{secrets.token_urlsafe(24)}"
            room = Room(context=session.max_context, bytes=session.max_prompt_bytes)
            door = Door(self._url, key, session, room, table, frozenset(leave_out))
            door.turned_away = self._turned_away[0]
            self._doors[door.key] = door
            rewards = session.rewards
            if rewards is not None and not rewards.closed:
                door.reward_key = f"rk-{secrets.token_urlsafe(24)}"
                for key in (door.reward_key, door.key)[: 1 + rewards.by_sampler]:
                    self._rewards.open(key, rewards, session.conversation)
                    rewards.when_closed(partial(self._close_rewards, key))
            return door

    async def shut(self, door: Door, *, drop: bool = False) -> None:
        """Close a door. Closing the last door stops the server, unless a rollout waits for rewards.

        Args:
            door: door that no client uses any more.
            drop: whether running replies are cancelled and become the same turns when they are requested again.
                Otherwise they end with the tokens sampled so far, which are recorded.
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
        """Stop accepting rewards under a key."""
        self._rewards.close(key)
        await self._stop_unused()

    async def _stop_unused(self) -> None:
        """Stop the server if no door is open and no rollout waits for rewards."""
        async with self._changing:
            if not self._doors and not self._rewards.awaits and not self._kept:
                await self._stop()

    @asynccontextmanager
    async def open_outside(self, keys: RunKeys, address: str, lease_s: float, gateway: str = "") -> AsyncIterator[str]:
        """Answer external programs that have the run's keys, while the context lasts; yields the address.

        When the context ends, waiting claims are told that the run is over; after an error, that it has stopped, since
        another process may resume it.

        Args:
            keys: keys of the run.
            address: `HOST:PORT` of this server.
            lease_s: seconds until a worker's lease expires.
            gateway: address of `sparring gateway`, which replaces this server; empty without it.

        Raises:
            BadInput: the address is in use.
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
        posted = {path: self._endpoint(dialect) for dialect in DIALECTS for path in _paths(dialect)}
        posted[Messages.path + "/count_tokens"] = self._count_endpoint(Messages(), "input_tokens")
        for version in ("v1beta", "v1"):
            posted[f"/{version}/models/{{model}}:countTokens"] = self._count_endpoint(Gemini(), "totalTokens")
        routes: list[Route] = [Endpoint(path, endpoint, methods=["POST"]) for path, endpoint in posted.items()]
        routes.append(Endpoint(Responses.path, self._no_socket, methods=["GET"]))
        for version in ("v1beta", "v1"):
            routes.append(Endpoint(f"/{version}/models", self._models))
            routes.append(Endpoint(f"/{version}/models/{{name:path}}", self._model))
        routes += self.routes_of_run(self._run)
        routes += [Endpoint("/health", self._health), Endpoint("/openapi.json", self._openapi)]
        behind_key = Mount(PATH, app=Router(routes, default=no_endpoint))
        guarded = at_home(Router([*routes, behind_key], default=no_endpoint), foreign_page_refusal, keyed=shows_key)
        return with_request_ids(answering_misdirected(guarded, self._record_misdirected))

    def routes_of_run(
        self, run: RunLink | None = None, hold: Callable[[Request, CallResponse], None] | None = None
    ) -> list[Route]:
        """Return the routes that only the run's process can answer. A gateway in its own process passes their requests
        on unchanged.

        Args:
            run: link that passes the requests on; None in the run's process.
            hold: function that takes over the delivery report of a tool call, if a gateway reads the response; None if
                the client itself reads it.
        """
        posted = {"/v1/rewards": self._rewards.endpoint, **self.workers.endpoints()}
        tools: Answer = partial(self._tools, hold)
        if run is not None:
            posted, tools = (
                dict.fromkeys(posted, _forwarding_endpoint(run.forward)),
                _forwarding_endpoint(run.forward_to_tools),
            )
        routes = [Endpoint(path, endpoint, methods=["POST"]) for path, endpoint in posted.items()]
        return [*routes, Endpoint("/mcp", tools, methods=["GET", "POST", "DELETE"])]

    def _endpoint(self, dialect: Dialect) -> Any:
        async def endpoint(request: Request) -> Response:
            try:
                return await self._answer(dialect, request)
            except ClientDisconnect:
                return Response(status_code=499)
            except SparringError as error:
                return refusal_response(dialect, error)

        return endpoint

    def _count_endpoint(self, dialect: Dialect, field: str) -> Any:
        """Return the endpoint that counts the tokens of a prompt. `field` is the name of the count in the response."""

        async def endpoint(request: Request) -> Response:
            try:
                door = await self._door(request)
                client_request, _ = await read_call(dialect, request, door)
                session = door.models.session(client_request.model)
                count = await door.exchanges.count(session, client_request)
            except ClientDisconnect:
                return Response(status_code=499)
            except SparringError as error:
                await self._record_refusal(request, error)
                return refusal_response(dialect, error)
            return Response(msgspec.json.encode({field: count}), media_type="application/json")

        return endpoint

    async def _models(self, request: Request) -> Response:
        """List the models in the format of the client's vendor."""
        dialect = dialect_of(request.scope)
        try:
            models = (await self._door(request)).models
        except SparringError as error:
            return refusal_response(dialect, error)
        body = models.list_for_google() if isinstance(dialect, Gemini) else models.list_for_openai()
        return Response(msgspec.json.encode(body), media_type="application/json")

    async def _model(self, request: Request) -> Response:
        """Describe one model in the format of the client's vendor."""
        dialect, name = dialect_of(request.scope), request.path_params["name"]
        try:
            (await self._door(request)).models.session(name)
        except SparringError as error:
            await self._record_refusal(request, error)
            return refusal_response(dialect, error)
        body = google_entry(name) if isinstance(dialect, Gemini) else openai_entry(name)
        return Response(msgspec.json.encode(body), media_type="application/json")

    async def _no_socket(self, request: Request) -> Response:
        """Refuse a WebSocket; after this status clients switch to HTTP at once."""
        error = ClientError(status=426, message="expected POST, got a WebSocket; send requests by POST")
        return Response(msgspec.json.encode(Responses().error(error)), status_code=426, media_type="application/json")

    async def _tools(self, hold: Callable[[Request, CallResponse], None] | None, request: Request) -> Response:
        """Answer a client of the world's tools."""
        try:
            door = self.door(key_of(request))
            data = await read_tool_call(request, door.room)
            response = await answer_tools(door.tools, door.calls, request, data)
            if hold is not None and isinstance(response, CallResponse):
                hold(request, response)
            return response
        except ClientDisconnect:
            return Response(status_code=499)
        except SparringError as error:
            status = client_error(error).status
            return Response(str(error), status_code=status, headers=retry_headers(status))

    async def _health(self, request: Request) -> Response:
        return Response(b"{}", media_type="application/json")

    async def _openapi(self, request: Request) -> Response:
        return Response(msgspec.json.encode(document()), media_type="application/json")

    async def _answer(self, dialect: Dialect, request: Request) -> Response:
        """Return the response to a request for a reply. It reads a new exchange, or the one that the request repeats.

        Raises:
            SparringError: the request is refused.
        """
        door = await self._door(request)
        try:
            client_request, digest = await read_call(dialect, request, door)
            client_request = _with_label(client_request, door.models)
            session = door.models.session(client_request.model)
        except Overflow as limit:
            await door.exchanges.overflow(limit)
            raise
        except BadInput as error:
            await door.exchanges.refuse(door.models.sessions[0], str(error))
            raise
        headers = {NOTED: ", ".join(client_request.noted)} if client_request.noted else {}
        if client_request.samples_nothing:
            return empty_response(dialect, client_request, await door.exchanges.hear(client_request), headers)
        exchange = door.exchanges.begin(
            digest, retried=is_retried(request.scope["headers"]), session=session, wanted=client_request
        )
        return ExchangeResponse(
            exchange,
            dialect,
            client_request,
            session.bytes_of,
            headers=headers,
            ping_s=door.ping_s,
        )

    async def _record_misdirected(self, error: Misdirected) -> None:
        """Record the refusal of a misdirected request in the session of its key."""
        await self._record_refusal(Request(error.scope), error)

    async def _record_refusal(self, request: Request, error: SparringError) -> None:
        """Record in the session of a request's key that the request, which asked for no reply, was refused."""
        with suppress(SparringError):
            door = await self._door(request)
            await door.exchanges.refuse(door.models.sessions[0], str(error), misdirected=True)

    def door(self, key: str) -> Door:
        """Return the door of a key.

        Raises:
            WrongKey: the key opens no door.
        """
        door = self._doors.get(key)
        if door is None:
            error = wrong_key("one of a rollout that is over, or of none")
            self._turned_away = (self._turned_away[0] + 1, str(error))
            raise error
        return door

    def knows(self, key: str) -> bool:
        """Return whether a key opens a door, rewards or the endpoints of workers."""
        return key in self._doors or self._rewards.knows(key) or self.workers.knows(key)

    async def _door(self, request: Request) -> AnsweredDoor:
        """Return the door of a request's key, in this process or in the run's.

        Raises:
            WrongKey: the key opens no door, or the request has two different keys.
        """
        key = key_of(request)
        return self.door(key) if self._run is None else await self._run.door(key)


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
    """Open a door to a session of the running event loop for as long as the context lasts.

    Args:
        session: session of an episode.
        models: other model names of the client, each with its session or with the name of another entry, as in
            `{"claude-*": "policy"}`.
        leave_out: types of vendor-hosted tools, such as `web_search`, that are dropped from requests instead of
            refused.
        gateway: gateway that opens the door; None: the one of the event loop.

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


def _forwarding_endpoint(forward: Answer) -> Answer:
    """Return an endpoint that passes requests on."""

    async def endpoint(request: Request) -> Response:
        try:
            return await forward(request)
        except ClientDisconnect:
            return Response(status_code=499)
        except SparringError as error:
            return word_refused(error)

    return endpoint


def _with_label(client_request: ClientRequest, models: ModelTable[Any]) -> ClientRequest:
    """Return a request with the label of its model, unless its client gave a label. Raises UnknownModel."""
    label, evidence = models.label(client_request.model), client_request.evidence
    if label is None or evidence.label is not None:
        return client_request
    return replace(client_request, evidence=replace(evidence, label=label))


def _paths(dialect: Dialect) -> tuple[str, ...]:
    """Return the paths of a dialect; clients of Google use two versions of each path."""
    return (dialect.path, dialect.path.replace("/v1beta/", "/v1/")) if isinstance(dialect, Gemini) else (dialect.path,)
