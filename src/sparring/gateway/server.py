"""HTTP server of the sessions of rollouts, each behind a key of its own.

    async with open_door(episode.session()) as door:
        client = openai.AsyncOpenAI(base_url=f"{door.url}/v1", api_key=door.key)

The key is the rollout's capability: it names the session, and dies with the door, for rewards when the rollout is
scored. One server answers for all doors that are open on an event loop, and is there while one is. A request whose
connection breaks is sampled to its end, because clients send it again: an equal one then gets that reply.
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

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Mount, Route, Router
from starlette.types import ASGIApp

from sparring.errors import BadInput, SparringError
from sparring.gateway.connection import PING_S, ExchangeResponse, unsampled
from sparring.gateway.dialects.chat_completions import ChatCompletions
from sparring.gateway.dialects.dialect import ClientError, ClientRequest, Dialect
from sparring.gateway.dialects.gemini import Gemini
from sparring.gateway.dialects.messages import Messages
from sparring.gateway.dialects.responses import Responses
from sparring.gateway.exchange import Exchanges, is_retried
from sparring.gateway.hosts import at_home, shows_key
from sparring.gateway.keys import PATH, KeyTable, key_of, wrong_key
from sparring.gateway.models import ModelTable, model_listed, model_listed_for_google
from sparring.gateway.openapi import document
from sparring.gateway.reading import Overflow, Room, read_call, read_tool_call
from sparring.gateway.refusals import (
    Endpoint,
    Misdirected,
    client_error,
    dialect_of,
    directed,
    from_elsewhere,
    identified,
    no_endpoint,
    refused,
    retrying,
)
from sparring.gateway.rewards import RewardDesk
from sparring.gateway.serving import LocalServer, server_settings
from sparring.gateway.tool_server import ToolCalls, answer_tools
from sparring.gateway.workers import RunKeys, WorkerDesk, listening_at, reached
from sparring.protocols import Session, ToolHost

NOTED = "x-sparring-noted"
"""Header of an answer: fields of the request that had no effect."""

DIALECTS: tuple[Dialect, ...] = (ChatCompletions(), Messages(), Responses(), Gemini(), Gemini(streams=True))


@dataclass(eq=False, slots=True)
class Door:
    """Address of one session.

    Attributes:
        url: of the server, without a path.
        key: what a client sends as its API key.
        reward_key: under which the rollout is rewarded from outside; empty where the run takes no rewards.
        turned_away: how often clients had been turned away for their keys when it was opened.
        session: behind it, of the policy.
        room: that a prompt of the policy has.
        models: that its client may name; the policy is one.
        leave_out: types of tools of the vendor's servers that are left out of a request in the place of refusing it.
        exchanges: of its client's requests.
        tools: of the world, as an MCP server at `/mcp`; None where it has none.
        calls: of these tools.
        ping_s: seconds after which a client that waits for events is sent one that says nothing.
        reading: held while a request is read, so that they are read in the order in which they came.
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

    Attributes:
        address: of a proxy in front of this server, `sparring gateway`, by which alone it is reached; empty for none.
        there: set while the proxy is there; doors wait for it.
        workers: programs elsewhere that claim rollouts.
    """

    def __init__(self) -> None:
        self.address = ""
        self.there = asyncio.Event()
        self._doors: KeyTable[Door] = KeyTable()
        self._rewards = RewardDesk(self._doors)
        self.workers = WorkerDesk()
        self._kept = False
        self._server: LocalServer | None = None
        self._serving: asyncio.Task[None] | None = None
        self._url = ""
        self._changing = asyncio.Lock()
        self._turned_away = (0, "")  # how often a key opened no door, and what its client was told

    async def open(
        self,
        session: Session,
        models: Mapping[str, Session | str] = {},
        leave_out: Sequence[str] = (),
    ) -> Door:
        """Open a door to a session, and the server where none runs.

        Args:
            session: of the policy.
            models: other names that the client may have for models, as in `ModelTable`.
            leave_out: types of the vendor's tools that are left out in the place of refusing them.

        Raises:
            BadInput: the table of models is wrong.
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
        """Close a door. The last one stops the server, where no rollout awaits rewards.

        Args:
            door: no request comes through it any more.
            drop: whether the replies that are under way are dropped, to be the same turns when they are asked for
                again. Otherwise they end with what was sampled, which is recorded.
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
        """Take no more rewards under a key."""
        self._rewards.close(key)
        await self._stop_unused()

    async def _stop_unused(self) -> None:
        """Stop the server where neither a door is open nor a rollout awaits its rewards."""
        async with self._changing:
            if not self._doors and not self._rewards.awaits and not self._kept:
                await self._stop()

    @asynccontextmanager
    async def open_outside(self, keys: RunKeys, address: str, lease_s: float, gateway: str = "") -> AsyncIterator[str]:
        """Answer programs elsewhere that have the run's keys, at an address that is yielded. Claims that wait when the
        context ends are told that the run is over, unless an error ended it: another process may go on with the run.

        Args:
            keys: of the run.
            address: `HOST:PORT` of this server, which is kept.
            lease_s: seconds after which a worker's lease runs out.
            gateway: address of `sparring gateway`, in the place of this server; empty for none.

        Raises:
            BadInput: the address is taken.
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
        listening = listening_at(host, port)
        self._url = f"http://{reached(host)}:{listening.getsockname()[1]}"
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
        posted[Messages.path + "/count_tokens"] = self._counting(Messages(), "input_tokens")
        for version in ("v1beta", "v1"):
            posted[f"/{version}/models/{{model}}:countTokens"] = self._counting(Gemini(), "totalTokens")
        routes: list[Route] = [Endpoint(path, endpoint, methods=["POST"]) for path, endpoint in posted.items()]
        routes.append(Endpoint(Responses.path, self._no_socket, methods=["GET"]))
        for version in ("v1beta", "v1"):
            routes.append(Endpoint(f"/{version}/models", self._models))
            routes.append(Endpoint(f"/{version}/models/{{name:path}}", self._model))
        posted = {"/v1/rewards": self._rewards.endpoint, **self.workers.endpoints()}
        routes += [Endpoint(path, endpoint, methods=["POST"]) for path, endpoint in posted.items()]
        routes.append(Endpoint("/mcp", self._tools, methods=["GET", "POST", "DELETE"]))
        routes += [Endpoint("/health", self._health), Endpoint("/openapi.json", self._openapi)]
        behind_key = Mount(PATH, app=Router(routes, default=no_endpoint))
        guarded = at_home(Router([*routes, behind_key], default=no_endpoint), from_elsewhere, keyed=shows_key)
        return identified(directed(guarded, self._tell))

    def _endpoint(self, dialect: Dialect) -> Any:
        async def endpoint(request: Request) -> Response:
            try:
                return await self._answer(dialect, request)
            except ClientDisconnect:
                return Response(status_code=499)
            except SparringError as error:
                return refused(dialect, error)

        return endpoint

    def _counting(self, dialect: Dialect, field: str) -> Any:
        """Return the endpoint that counts the tokens of a prompt, and writes them into a field of this name."""

        async def endpoint(request: Request) -> Response:
            try:
                door = self.door(key_of(request))
                client_request, _ = await read_call(dialect, request, door)
                session = door.models.session(client_request.model)
                count = await door.exchanges.count(session, client_request)
            except ClientDisconnect:
                return Response(status_code=499)
            except SparringError as error:
                await self._note(request, error)
                return refused(dialect, error)
            return Response(msgspec.json.encode({field: count}), media_type="application/json")

        return endpoint

    async def _models(self, request: Request) -> Response:
        """List the models in the words of the client's vendor."""
        dialect = dialect_of(request.scope)
        try:
            models = self.door(key_of(request)).models
        except SparringError as error:
            return refused(dialect, error)
        body = models.listed_for_google() if isinstance(dialect, Gemini) else models.listed()
        return Response(msgspec.json.encode(body), media_type="application/json")

    async def _model(self, request: Request) -> Response:
        """Show one model in the words of the client's vendor."""
        dialect, name = dialect_of(request.scope), request.path_params["name"]
        try:
            self.door(key_of(request)).models.session(name)
        except SparringError as error:
            await self._note(request, error)
            return refused(dialect, error)
        body = model_listed_for_google(name) if isinstance(dialect, Gemini) else model_listed(name)
        return Response(msgspec.json.encode(body), media_type="application/json")

    async def _no_socket(self, request: Request) -> Response:
        """Refuse a WebSocket: a client that gets this status goes on by HTTP at once."""
        error = ClientError(status=426, message="expected POST, got a WebSocket; send requests by POST")
        return Response(msgspec.json.encode(Responses().error(error)), status_code=426, media_type="application/json")

    async def _tools(self, request: Request) -> Response:
        """Answer a client of the world's tools."""
        try:
            door = self.door(key_of(request))
            data = await read_tool_call(request, door.room)
            return await answer_tools(door.tools, door.calls, request, data)
        except ClientDisconnect:
            return Response(status_code=499)
        except SparringError as error:
            status = client_error(error).status
            return Response(str(error), status_code=status, headers=retrying(status))

    async def _health(self, request: Request) -> Response:
        return Response(b"{}", media_type="application/json")

    async def _openapi(self, request: Request) -> Response:
        return Response(msgspec.json.encode(document()), media_type="application/json")

    async def _answer(self, dialect: Dialect, request: Request) -> Response:
        """Return the answer to one request, which samples from now on, or that of the request that it repeats.

        Raises:
            SparringError: it is refused.
        """
        door = self.door(key_of(request))
        try:
            client_request, digest = await read_call(dialect, request, door)
            client_request = _labelled(client_request, door.models)
            session = door.models.session(client_request.model)
        except Overflow as limit:
            await door.exchanges.overflow(limit)
            raise
        except BadInput as error:
            await door.exchanges.refuse(door.models.sessions[0], str(error))
            raise
        headers = {NOTED: ", ".join(client_request.noted)} if client_request.noted else {}
        if client_request.samples_nothing:
            return unsampled(dialect, client_request, await door.exchanges.hear(client_request), headers)
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

    async def _tell(self, error: Misdirected) -> None:
        """Take note of the refusal of a misdirected request."""
        await self._note(Request(error.scope), error)

    async def _note(self, request: Request, error: SparringError) -> None:
        """Have the session that a request's key opens take note of its refusal; it asked for no reply."""
        with suppress(SparringError):
            door = self.door(key_of(request))
            await door.exchanges.refuse(door.models.sessions[0], str(error), misdirected=True)

    def door(self, key: str) -> Door:
        """Return the door that a key opens.

        Raises:
            WrongKey: there is none.
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
    """Open a door to a session of the running event loop for as long as the context lasts.

    Args:
        session: of an episode.
        models: other names that the client may have for models, each with what answers: a session, or the name of an
            entry; `{"claude-*": "policy"}`.
        leave_out: types of tools of the vendor's own servers, such as `web_search`, that are left out of a request in
            the place of refusing it.
        gateway: has the door; None: that of the event loop.

    Raises:
        BadInput: the table of models is wrong.
    """
    gateway = gateway or gateway_here()
    door = await gateway.open(session, models, leave_out)
    try:
        yield door
    except BaseException:
        await gateway.shut(door, drop=True)
        raise
    await gateway.shut(door)


def _labelled(client_request: ClientRequest, models: ModelTable[Any]) -> ClientRequest:
    """Return a request with the label of its model, where its client gives none. Raises `UnknownModel`."""
    label, evidence = models.label(client_request.model), client_request.evidence
    if label is None or evidence.label is not None:
        return client_request
    return replace(client_request, evidence=replace(evidence, label=label))


def _paths(dialect: Dialect) -> tuple[str, ...]:
    """Return the paths of a dialect: Google's clients have two versions of it."""
    return (dialect.path, dialect.path.replace("/v1beta/", "/v1/")) if isinstance(dialect, Gemini) else (dialect.path,)
