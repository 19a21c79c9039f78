"""Token-level server: an engine over HTTP, token ids in and out. Torch-free; `wire` defines the formats.

    GET  /v1/model      description of the model and its version
    POST /v1/generate   a Completion, or with "stream" server-sent events
    POST /v1/abort      end a request with the tokens sampled so far
    POST /v1/score      log-probabilities of given tokens
    POST /v1/release    drop the KV of a conversation
    POST /v1/weights    serve other weights or another adapter, fetched from where they were published
    POST /v1/sleep      free the memory of weights and cache; requests wait
    POST /v1/wake       end the sleep and serve the given weights
    POST /v1/bucket     a part of weights, which POST /v1/weights then takes from this server
    POST /v1/sees       fetch published weights and drop them again
    POST /v1/files      serve another model, from the files of its checkpoint except the weights
    POST /v1/drop       stop serving an adapter
    GET  /health        200 while the engine answers
    GET  /metrics       counters, gauges and histograms for Prometheus
    GET  /openapi.json  OpenAPI document of these endpoints

An error is {"error": {"type", "message"}} with the HTTP status of its class, and belongs to one request. Ids of
requests and conversations are global to the server: clients that share a server have to choose different ids.
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sparring.engine import wire
from sparring.engine.events import EventStream, unless_left
from sparring.engine.metrics import Latencies
from sparring.engine.prometheus import exposition
from sparring.engine.prompts import KnownPrompts
from sparring.engine.turn_pieces import completion_alone
from sparring.errors import BadInput, EngineError, RequestRefused, SparringError, WeightsError, refusal
from sparring.generation import Completion, GenerateRequest, ScoreRequest
from sparring.protocols import Engine
from sparring.types import WeightRef
from sparring.weights.upload import Bucket, Received, UploadArea

BESIDE, OF_ID, OF_BIAS = 1 << 18, 24, 48
"""Maximum number of bytes of a request's body, as a sum of three parts: a constant, a number per token of the context,
and a number per token of the vocabulary, for biases."""

SWEEP_S = (0.2, 1.0, 5.0)
"""Seconds before each search for files that a disconnected client has published."""

F = TypeVar("F", bound=msgspec.Struct)
Asked = TypeVar("Asked", GenerateRequest, ScoreRequest)
Bind = Callable[[GenerateRequest], GenerateRequest]


class ServedEngine(Engine, Protocol):
    """Engine that the server can serve; an extension of `Engine`."""

    def describe(self, instance: str) -> wire.ServedModel:
        """Describe the engine for clients; `instance` is a random name of this start of the server."""
        ...

    async def check(self) -> None:
        """Check that requests are answered. Raises EngineError if they are not."""
        ...

    @property
    def metrics(self) -> dict[str, float]:
        """Counts since the start and present levels, by name."""
        ...

    @property
    def latencies(self) -> Latencies:
        """Latency histograms of the requests."""
        ...

    async def drop(self, adapter: str) -> None:
        """Serve no new request with an adapter. Raises EngineError if no adapter with this name is loaded."""
        ...


class Serving(NamedTuple):
    """Engine of a server, and its means to bind requests.

    Attributes:
        engine: engine that answers the requests; None: the server has no model yet.
        bind: function that turns the stop strings and the constraint of a request into functions on token ids.
    """

    engine: ServedEngine | None
    served: wire.ServedModel
    bind: Bind


Opens = Callable[[Mapping[str, bytes], str, str], Serving]
"""Function that opens an engine from a checkpoint's files except the weights (`weights.files`), a dtype and numerics.
The weights are sent later. The function blocks, and raises BadInput for files that are not of a model that can be
served."""


class TokenServer:
    """HTTP endpoints of one engine.

    Args:
        api_key: bearer token that clients must send to everything under /v1; "" for none.
        opens: function that opens a model from files that a client sends; None: the server keeps its model.
    """

    def __init__(self, serving: Serving, api_key: str = "", opens: Opens | None = None) -> None:
        self._api_key, self._opens, self._opening = api_key, opens, asyncio.Lock()
        self._numbers = itertools.count(1)
        self._counts: Counter[tuple[str, str]] = Counter()
        self._sweeping: asyncio.Task[None] | None = None
        self._serve(serving)

    def _serve(self, serving: Serving) -> None:
        self._serving, self._served = serving, serving.served
        self._prompts, self._base = KnownPrompts(), self._served.base
        self._uploads = UploadArea(self._served.state_bytes)
        self._most_bytes = BESIDE + OF_ID * self._served.context + OF_BIAS * self._served.vocab_size

    @property
    def _engine(self) -> ServedEngine:
        """Engine that answers the requests. Raises EngineError while the server has no model."""
        if self._serving.engine is None:
            raise EngineError("server: expected a model, got none yet; a run sends it when it begins")
        return self._serving.engine

    @property
    def _version(self) -> int:
        return 0 if self._serving.engine is None else self._serving.engine.version

    async def close(self) -> None:
        """Close the engine, if the server has one."""
        if self._serving.engine is not None:
            await self._serving.engine.close()

    def application(self) -> ASGIApp:
        """Return the ASGI application."""
        posts = (*wire.POSTS, "bucket")
        routes = [Route(f"/v1/{name}", getattr(self, f"_{name}"), methods=["POST"]) for name in posts]
        gets = {"/v1/model": self._model, "/health": self._health, "/metrics": self._metrics}
        gets["/openapi.json"] = self._document
        routes += [Route(path, answer, methods=["GET"]) for path, answer in gets.items()]
        handlers: dict[Any, Any] = {
            SparringError: self._refused,
            HTTPException: self._no_route,
            ClientDisconnect: self._left,
        }
        return self._guarded(Starlette(routes=routes, exception_handlers=handlers))

    def _guarded(self, inner: ASGIApp) -> ASGIApp:
        """Wrap an application: check the API key, and add the headers of every answer."""
        expected = f"Bearer {self._api_key}".encode()

        async def application(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                await inner(scope, receive, send)
                return

            async def signed(message: Message) -> None:
                if message["type"] == "http.response.start":
                    here = (
                        (wire.INSTANCE, self._served.instance),
                        (wire.VERSION, str(self._version)),
                        (wire.BASE, str(self._base)),
                    )
                    message["headers"] = [
                        *message["headers"],
                        *((name.encode(), value.encode()) for name, value in here),
                    ]
                await send(message)

            authorization = dict(scope["headers"]).get(b"authorization", b"")
            if self._api_key and scope["path"].startswith("/v1/") and not hmac.compare_digest(authorization, expected):
                wrong = refusal(
                    "authorization", "the server's API key as a bearer token", "a wrong key or none", "send it"
                )
                await _json(wire.problem(wrong), 401)(scope, receive, signed)
            else:
                await inner(scope, receive, signed)

        return application

    async def _model(self, request: Request) -> Response:
        return _json({**_plain(self._served), "version": self._version, "base": self._base})

    async def _document(self, request: Request) -> Response:
        return _json(wire.document())

    async def _health(self, request: Request) -> Response:
        if self._serving.engine is not None:
            await unless_left(request.receive, self._serving.engine.check())
        return _json({})

    async def _metrics(self, request: Request) -> Response:
        page = exposition(self._engine.metrics, self._engine.latencies.by_name, self._counts, self._engine.version)
        return Response(page, media_type="text/plain; version=0.0.4")

    async def _generate(self, request: Request) -> Response:
        form = await self._body(request, wire.GenerateForm)
        prompt = self._prompts.whole(form.conversation, form.prefix, form.tokens)
        wanted = await self._bound(replace(wire.generate_request(form), tokens=prompt.tokens))

        def ended(outcome: str | Completion) -> None:
            if isinstance(outcome, Completion):
                self._prompts.remember(form.conversation, prompt, outcome.tokens)
                outcome = outcome.finish_reason
            self._counts["generate", outcome] += 1

        if not form.stream:
            completion = await unless_left(request.receive, self._engine.generate(wanted))
            ended(completion)
            return _json(completion)
        pieces = completion_alone(self._engine, wanted) if form.deltas is False else self._engine.stream(wanted)
        first = asyncio.ensure_future(anext(pieces))
        # a request that can never be served fails here, with a status; all others are in the engine now
        await asyncio.sleep(0)
        if first.done():
            first.result()
        return EventStream(pieces, first, ended)

    async def _bound(self, wanted: GenerateRequest) -> GenerateRequest:
        """Assign an id to a request that has none, and bind the request's stop strings and constraint to token ids."""
        wanted = self._named(wanted)
        if not (wanted.sampling.stop_strings or wanted.sampling.constraint):
            return wanted
        try:
            return await asyncio.to_thread(self._serving.bind, wanted)  # a grammar may take a while to compile
        except BadInput as cause:
            raise RequestRefused(f"request {wanted.id}: {cause}") from cause

    def _named(self, wanted: Asked) -> Asked:
        return wanted if wanted.id else replace(wanted, id=f"{self._served.instance}-{next(self._numbers)}")

    async def _abort(self, request: Request) -> Response:
        form = await self._body(request, wire.AbortForm)
        await self._engine.abort(form.id)
        return _json({})

    async def _score(self, request: Request) -> Response:
        wanted = self._named(wire.noun(await self._body(request, wire.ScoreForm), ScoreRequest))
        return _json(await unless_left(request.receive, self._engine.score(wanted)))

    async def _release(self, request: Request) -> Response:
        conversation = (await self._body(request, wire.ReleaseForm)).conversation
        self._prompts.forget(conversation)
        await self._engine.release(conversation)
        return _json({})

    async def _weights(self, request: Request) -> Response:
        return await self._served_with(request, lambda ref: self._engine.pull(ref))

    async def _wake(self, request: Request) -> Response:
        return await self._served_with(request, lambda ref: self._engine.wake(ref))

    async def _sleep(self, request: Request) -> Response:
        await self._body(request, wire.SleepForm)
        await self._engine.sleep()
        return _json({})

    async def _served_with(self, request: Request, take: Callable[[WeightRef], Coroutine[Any, Any, None]]) -> Response:
        form = await self._body(request, wire.WeightForm)
        ref = self._located(wire.weight_ref(form))
        try:
            await unless_left(request.receive, take(ref))
        finally:
            self._drop_upload(ref)
        self._base = self._base if form.base is None else form.base
        return _json({})

    async def _sees(self, request: Request) -> Response:
        from sparring.weights.fetch import fetch  # imports torch, which the engine has imported

        ref = self._located(wire.weight_ref(await self._body(request, wire.SeesForm)))
        try:
            await asyncio.to_thread(fetch, ref)
        finally:
            self._drop_upload(ref)
        return _json({})

    async def _files(self, request: Request) -> Response:
        from sparring.weights.fetch import fetch  # imports torch, which the engine has imported
        from sparring.weights.files import contents, digest

        form = await self._body(request, wire.FilesForm)
        if self._opens is None:
            raise WeightsError("files: expected a server that was started without a model, got one with; start another")
        ref = self._located(wire.weight_ref(form))
        try:
            files = contents(await asyncio.to_thread(fetch, ref))
        finally:
            self._drop_upload(ref)
        async with self._opening:
            served, fast = self._served, form.numerics == "fast"
            if (served.files, served.dtype, served.numerics == "fast") != (digest(files), form.dtype, fast):
                await self._open(self._opens, files, form)
        return await self._model(request)

    async def _open(self, opens: Opens, files: Mapping[str, bytes], form: wire.FilesForm) -> None:
        """Close the engine, if any, and open an engine for other files. Raises WeightsError if the files are not of a
        model that can be served; the server then has no engine."""
        await self.close()
        self._serve(self._serving._replace(engine=None, served=msgspec.structs.replace(self._served, files="")))
        try:
            self._serve(await asyncio.to_thread(opens, files, form.dtype, form.numerics))
        except BadInput as cause:
            raise WeightsError(f"files: {cause}") from cause

    async def _bucket(self, request: Request) -> Response:
        head = request.headers.get(wire.BUCKET, "").encode()
        receiving = self._uploads.receive(wire.decode(head, Bucket, f"header {wire.BUCKET}"))
        async for chunk in request.stream():
            receiving.add(chunk)
        receiving.finish()
        return _json({})

    def _located(self, ref: WeightRef) -> WeightRef:
        """Return a reference that this process can fetch. Raises WeightsError if the reference's transport works only
        within one process."""
        where = f"weights of {ref.model} version {ref.version}"
        if ref.transport == "inline":
            transport = "'inline', which works in one process only"
            raise WeightsError(f"{where}: expected a transport between processes, got {transport}; publish them there")
        upload = ref.location.get("upload") if isinstance(ref.location, dict) else None
        if not isinstance(upload, str):
            return ref
        return replace(ref, location=Received(ref.location, self._uploads.complete(upload, where).data))

    def _drop_upload(self, ref: WeightRef) -> None:
        if isinstance(ref.location, Received):
            self._uploads.drop(ref.location.location["upload"])

    async def _drop(self, request: Request) -> Response:
        form = await self._body(request, wire.DropForm)
        await self._engine.drop(form.adapter)
        return _json({})

    async def _body(self, request: Request, kind: type[F]) -> F:
        """Decode the body of a request. Raises BadInput if the body is not JSON, or too long. Raises RequestRefused if
        the body has wrong or unknown fields, or a field without effect; or the URL has a query."""
        where, data = f"POST {request.scope['path']}", bytearray()
        if request.url.query:
            raise RequestRefused(f"{where}: expected no query, got {request.url.query}; send its fields in the body")
        async for chunk in request.stream():
            data += chunk
            if len(data) > self._most_bytes:
                raise refusal(where, f"a body of at most {self._most_bytes} bytes", "a longer one", "send less")
        try:
            form = wire.decode(bytes(data), kind, where)
        except BadInput as error:
            if isinstance(error.__cause__, msgspec.ValidationError):
                raise RequestRefused(str(error)) from error
            raise
        if problem := wire.passed_over(form):
            raise RequestRefused(f"{where}: expected {problem}; leave it out")
        return form

    async def _refused(self, request: Request, error: SparringError) -> Response:
        self._counts[request.scope["path"].rpartition("/")[2], type(error).__name__] += 1
        return _json(wire.problem(error), wire.status(error))

    async def _left(self, request: Request, error: ClientDisconnect) -> Response:
        """Count a client that disconnected before its answer. If it was sending weights, remove files that it has left
        (`_sweep`)."""
        if request.scope["path"] in ("/v1/weights", "/v1/wake") and (self._sweeping is None or self._sweeping.done()):
            self._sweeping = asyncio.create_task(_sweep())
        self._counts[request.scope["path"].rpartition("/")[2], "left"] += 1
        return Response(status_code=499)

    async def _no_route(self, request: Request, error: HTTPException) -> Response:
        where = f"{request.method} {request.scope['path']}"
        wrong = refusal(where, "one of this server's endpoints", error.detail, "see docs/engine/server.md")
        return _json(wire.problem(wrong), error.status_code)


async def _sweep() -> None:
    """Remove files that a killed client has published in shared memory. Try several times, because its connection may
    end before its locks."""
    from sparring.weights.shared_memory import sweep  # imports torch, which the engine has imported

    for pause_s in SWEEP_S:
        await asyncio.sleep(pause_s)
        await asyncio.to_thread(sweep)


def _json(value: Any, status: int = 200) -> Response:
    return Response(wire.encode(value), status, media_type="application/json")


def _plain(served: wire.ServedModel) -> dict[str, Any]:
    return {name: getattr(served, name) for name in served.__struct_fields__}
