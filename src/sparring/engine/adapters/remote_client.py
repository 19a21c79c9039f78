"""`RemoteClient`: client that samples from an engine in another process (`sparring serve`) and sends no weights to it.
Torch-free."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, closing
from dataclasses import replace
from typing import Any, TypeVar

import msgspec

from sparring.engine import wire
from sparring.engine.adapters.answers import TurnCheck
from sparring.engine.adapters.client import ClientCounts, authorization, completion_of
from sparring.engine.adapters.connections import Connections, HttpAnswer, blocking
from sparring.engine.config import EngineConfig
from sparring.engine.prompts import SentPrompt, SentPrompts
from sparring.errors import EngineError, RequestRefused, boundary, refusal
from sparring.generation import Completion, Delta, GenerateRequest, Runs, ScoreRequest, Scores

CONNECT_S = 10.0
T = TypeVar("T")
P = TypeVar("P", Delta, Completion)


class _SentRequest:
    """Request that this client has sent; the event `there` is set once the server has the request, or it has ended."""

    def __init__(self) -> None:
        self.there = asyncio.Event()


class RemoteClient:
    """Client of `sparring serve` over HTTP, on one event loop. Implements `Engine`, except updates. Every answer of the
    server has the served version and the version that the run counts as 0, so all its clients count versions as the run
    does.

    Args:
        url: `http://host:port`, or `unix:path` for a socket.
        name: name of the model in the run; updates of other models are refused.
        api_key: key sent as a bearer token; "" for none.
        awaited: whether the server may start later. The constructor then does not call `ask`.

    Attributes:
        node: name of the server's machine; "" before it has answered.

    Raises:
        BadInput: no server answers at `url`, or it needs another key.
    """

    def __init__(self, url: str, *, name: str = "policy", api_key: str = "", awaited: bool = False) -> None:
        self.url, self.node, self._name = url, "", name
        self._headers = authorization(api_key)
        self._served: wire.ServedModel | None = None
        self._version, self._base, self._instance = 0, 0, ""
        self._newest: int | None = None  # newest version that this client sent
        self._counts = ClientCounts()
        self._live: dict[str, list[_SentRequest]] = defaultdict(list)
        self._prompts = SentPrompts()
        if not awaited:
            served = self.ask()  # it also refuses a url that cannot be read
            self._version, self._base, self._instance = served.version, served.base, served.instance
        self._connections = self._new_connections()

    @property
    def served(self) -> wire.ServedModel:
        """Description of the server by its last answer to `ask`. Raises EngineError before the first answer."""
        if self._served is None:
            raise EngineError(f"{self.place}: expected a server, got no answer yet; start it")
        return self._served

    def ask(self) -> wire.ServedModel:
        """Ask the server what it serves. Blocks. Raises BadInput as the constructor does."""
        self._served = self._ask_what_is_served()
        self.node = self._served.node
        return self._served

    @property
    def version(self) -> int:
        """Version of the served weights as the run counts versions, from the server's last answer."""
        return self._version - self._base

    @property
    def place(self) -> str:
        """Name of the server in messages."""
        return f"engine at {self.url}"

    @property
    def metrics(self) -> dict[str, float]:
        """Counts of `ClientCounts` since the start."""
        return dict(self._counts.values)

    def check(self, dtype: str, numerics: str, config: EngineConfig) -> None:
        """Check that the server computes like the run's model, and that its limits fit `[engine]`.

        Args:
            numerics: "fast", or the exact path of the training process, from `ops.path_name`.

        Raises:
            BadInput: the server's engine is of another kind, computes differently, or has a smaller context.
        """
        served, where = self.served, f"engine at {self.url}"
        kind = "vllm" if config.kind == "vllm" else "native"
        if served.kind != kind:
            expected = f"a {kind} engine, as engine.kind says"
            remedy = (
                f'serve it with --set engine.kind={kind}, or give only {served.kind} engines and engine.kind = "%s"'
            )
            raise refusal(where, expected, served.kind, remedy % ("vllm" if kind == "native" else "remote"))
        if served.dtype != dtype:
            raise refusal(
                where, f"a model in {dtype}, as in models.{self._name}.dtype", served.dtype, "serve it with --dtype"
            )
        if kind == "vllm":
            return
        if (served.numerics == "fast") != (numerics == "fast"):
            wanted = "fast" if numerics == "fast" else "exact"
            remedy = "serve it with --numerics"
            raise refusal(where, f"numerics {wanted}, as in models.{self._name}.numerics", served.numerics, remedy)
        if served.numerics != numerics:
            remedy = "serve it on a processor like this one, with the same SPARRING_KERNELS"
            raise refusal(where, f"kernel path {numerics}, as in this process", served.numerics, remedy)
        room = min(served.max_positions, config.kv.capacity(served.token_bytes))
        if served.context < room:
            remedy = "serve it with a larger engine.kv.bytes, or lower it in the recipe"
            raise refusal(where, f"a context of {room} tokens, as engine.kv.bytes allows", str(served.context), remedy)

    async def generate(self, request: GenerateRequest) -> Completion:
        return await completion_of(self._pieces(request, deltas=False))

    async def stream(self, request: GenerateRequest) -> AsyncIterator[Delta | Completion]:
        async with aclosing(self._pieces(request, deltas=True)) as pieces:
            async for piece in pieces:
                yield piece

    async def abort(self, request: str) -> None:
        for live in self._live.get(request, ()):
            await live.there.wait()
        await self._post("abort", wire.AbortForm(id=request))

    async def score(self, request: ScoreRequest) -> Scores:
        answer = await self._post("score", request)
        scores = self._read(answer, Scores, f"score {request.id}")
        return replace(scores, version=scores.version - self._base)

    async def release(self, conversation: str) -> None:
        self._prompts.forget(conversation)
        await self._post("release", wire.ReleaseForm(conversation=conversation))

    async def drop(self, adapter: str) -> None:
        """Make the server serve no new request with this adapter."""
        await self._post("drop", wire.DropForm(adapter=self.served.model if adapter == self._name else adapter))

    async def sleep(self) -> None:
        await self._post("sleep", wire.SleepForm())

    async def ping(self) -> bool:
        """Return whether the server is the same process as before. Raises EngineError if the server does not answer, or
        its engine is broken."""
        where = f"{self.place}: ping"
        with boundary(EngineError, where):
            with await self._connections.get("/health") as answer:
                body = await answer.read()
        if answer.status == 200 and answer.headers.get(wire.INSTANCE) != self._instance:
            return False
        self._check(answer.status, body, answer.headers, where)
        return True

    def move_to(self, url: str) -> None:
        """Send further requests to another address, at which the server was restarted. Running requests fail."""
        self._connections.close()
        self.url = url
        self._connections = self._new_connections()

    async def close(self) -> None:
        """Drop running requests. The server continues."""
        self._connections.close()

    def _new_connections(self) -> Connections:
        return Connections(self.url, self._headers, connect_s=CONNECT_S)

    def _ask_what_is_served(self) -> wire.ServedModel:
        try:
            status, headers, body = blocking(self._model_answer())
        except (OSError, ValueError) as error:
            raise wire.unreachable(self.url, f"{type(error).__name__}: {error}") from error
        if status == 401:
            raise refusal(
                f"engine at {self.url}", "the server's API key", "a wrong key or none", "set engine.api_key_env"
            )
        if status != 200 or wire.INSTANCE not in headers:
            raise wire.unreachable(self.url, f"another server, status {status}")
        return wire.decode(body, wire.ServedModel, f"engine at {self.url}")

    async def _model_answer(self) -> tuple[int, Mapping[str, str], bytes]:
        with closing(self._new_connections()) as server:
            async with asyncio.timeout(CONNECT_S):
                with await server.get("/v1/model") as answer:
                    return answer.status, answer.headers, await answer.read()

    async def _pieces(self, request: GenerateRequest, *, deltas: bool) -> AsyncGenerator[Delta | Completion, None]:
        where, live = f"engine at {self.url}: request {request.id}", _SentRequest()
        form = wire.generate_form(request, deltas=deltas)
        self._live[request.id].append(live)
        try:
            with boundary(EngineError, where):
                answer, prompt = await self._ask(form)
                with answer:
                    body = b"" if answer.status == 200 else await answer.read()
                    self._check(answer.status, body, answer.headers, where)
                    base, check = self._base, TurnCheck(request, self.served.vocab_size, where)
                    live.there.set()
                    async for name, data in _events(answer):
                        if name == "error":
                            raise wire.raised(self._read(data, wire.Failed, where).error, where)
                        if name == "completion":
                            completion = self._read(data, Completion, where)
                            check.check(completion, self._newest)
                            self._prompts.remember(request.conversation, prompt, completion.tokens)
                            yield self._counts.completed(_renumbered(completion, base))
                            return
                        delta = self._read(data, Delta, where)
                        check.check(delta, self._newest)
                        yield _renumbered(delta, base)
                    raise EngineError(
                        f"{where}: expected a completion, got the end of the answer; check that the server still runs"
                    )
        finally:
            live.there.set()
            self._live[request.id].remove(live)
            if not self._live[request.id]:
                del self._live[request.id]

    async def _ask(self, form: wire.GenerateForm) -> tuple[HttpAnswer, SentPrompt]:
        """Send a request to generate, without the ids that the server remembers. If the server has forgotten these ids,
        send the whole prompt. Return the answer and the prompt."""
        short, prompt = self._prompts.shortened(form)
        answer = await self._connections.post("/v1/generate", wire.encode(short))
        if short.prefix is None or answer.status != wire.STATUS[wire.UnknownPrefix]:
            return answer, prompt
        with answer:
            await answer.read()
        self._prompts.forget(form.conversation)
        whole, prompt = self._prompts.shortened(form)
        return await self._connections.post("/v1/generate", wire.encode(whole)), prompt

    async def _post(self, name: str, value: Any, *, adopts: bool = False) -> bytes:
        """Send a request; return the answer's body. With `adopts` the answer may come from a restarted server."""
        where = f"engine at {self.url}: {name}"
        with boundary(EngineError, where):
            with await self._connections.post(f"/v1/{name}", wire.encode(value)) as answer:
                body = await answer.read()
            self._check(answer.status, body, answer.headers, where, adopts=adopts)
            return body

    def _check(self, status: int, body: bytes, headers: Mapping[str, str], where: str, *, adopts: bool = False) -> None:
        """Check that a response is no error, that the server is still the same process, and that it serves the weights
        of this client. Raises the server's error, or EngineError."""
        instance = headers.get(wire.INSTANCE, "")
        if status != 200:
            error = wire.error_of(status, body, where)
            if isinstance(error, RequestRefused) and (status == 401 or not adopts and instance != self._instance):
                raise EngineError(str(error))  # another server has this address: the request may be served elsewhere
            raise error
        version, base = (int(headers.get(name, default)) for name, default in ((wire.VERSION, -1), (wire.BASE, 0)))
        if not adopts and instance != self._instance:
            raise EngineError(
                f"{where}: expected the same server, got a restarted one with other weights; publish the weights again"
            )
        if not adopts and self._newest is not None and (version > self._newest or base != self._base):
            expected = f"version {self._newest}, the last one sent, of a run that began at {self._base}"
            raise EngineError(f"{where}: expected {expected}, got {version} and {base}; use one server per run")
        self._base = base
        # answers overtake each other: a head may have been sent before an update that is already acknowledged
        self._version = version if instance != self._instance else max(version, self._version)
        self._instance = instance

    @staticmethod
    def _read(data: bytes, kind: type[T], where: str) -> T:
        with boundary(EngineError, where, "an answer of the same Sparring version", "install the same version there"):
            return msgspec.json.decode(data, type=kind)


def check_distinct(clients: Sequence[RemoteClient]) -> None:
    """Check that no two clients have the same server. Raises BadInput if two addresses are of one server."""
    places: dict[str, str] = {}
    for client in clients:
        other = places.setdefault(client.served.instance, client.place)
        if other != client.place:
            raise refusal(
                "engine.urls", "a server of its own at each address", f"{other} at {client.place} too", "leave one out"
            )


async def _events(answer: HttpAnswer) -> AsyncIterator[tuple[str, bytes]]:
    rest, searched = bytearray(), 0
    async for piece in answer.pieces():
        rest += piece
        while (end := rest.find(b"\n\n", searched)) >= 0:
            name, _, data = bytes(rest[:end]).partition(b"\ndata: ")
            del rest[: end + 2]
            searched = 0
            yield name.removeprefix(b"event: ").decode(), data
        searched = max(0, len(rest) - 1)  # a long event comes in many pieces


def _renumbered(piece: P, base: int) -> P:
    """Return a piece of a turn, or the whole turn, with versions counted from `base`."""
    if not base:
        return piece
    versions, kv_versions = (
        Runs(lengths=runs.lengths, values=tuple(value - base for value in runs.values))
        for runs in (piece.versions, piece.kv_versions)
    )
    return replace(piece, versions=versions, kv_versions=kv_versions)
