"""Errors in the words of the vendor whose client gets them."""

from __future__ import annotations

import re
import secrets
from collections.abc import Awaitable, Callable

import msgspec
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sparring.errors import BadInput, LimitReached, PolicyFailure, RequestRefused, SparringError, refusal
from sparring.gateway.dialects.chat_completions import ChatCompletions
from sparring.gateway.dialects.dialect import NO_RETRY, ClientCall, ClientError, ClientRequest, Dialect
from sparring.gateway.dialects.gemini import Gemini
from sparring.gateway.dialects.messages import Messages
from sparring.gateway.dialects.responses import Responses
from sparring.gateway.keys import WrongKey
from sparring.gateway.models import UnknownModel

_KEY = re.compile(r"/k/[^/]+(?=/)")
"""Beginning of a path that has the key."""

VERSION_TWICE = re.compile(r"/v1(?:beta)?(?=/v1(?:beta)?/)")
"""Beginning of a path that a client asks for whose base URL has the version that it adds itself."""

WITHOUT_VERSION = frozenset(("/chat/completions", "/responses", "/models", "/messages"))
"""Paths that a client asks for whose base URL lacks the version."""

_FIELDS = frozenset(("tools",))
"""Places of what a renderer refuses that are fields of a request in every dialect."""


class RefusedField(BadInput):
    """Refusal of what a client asks for; `where` is the field of its request."""


def read_request(dialect: Dialect, call: ClientCall) -> ClientRequest:
    """Read a request in a dialect.

    Raises:
        RefusedField: it is malformed, or asks for what cannot be had.
    """
    try:
        return dialect.read(call)
    except BadInput as error:
        raise RefusedField(str(error), error.where) from error


def refused(dialect: Dialect, error: SparringError) -> Response:
    """Return the refusal of a request in a dialect's words. A `LimitReached` says how much too long its prompt was."""
    return _written(dialect, client_error(error))


def client_error(error: SparringError) -> ClientError:
    """Return an error as a client is told of it."""
    text = str(error)
    if isinstance(error, WrongKey):
        return ClientError(status=401, message=text)
    if isinstance(error, UnknownModel):
        return ClientError(status=404, message=text, field="model")
    if isinstance(error, RefusedField):
        return ClientError(status=400, message=text, field=error.where)
    if isinstance(error, LimitReached):
        return ClientError(status=400, message=text, too_long=error.too_long)
    if isinstance(error, BadInput) and error.where in _FIELDS:
        return ClientError(status=400, message=text, field=error.where)
    final = isinstance(error, (BadInput, PolicyFailure, RequestRefused))
    return ClientError(status=400 if final else 503, message=text)


def retrying(status: int) -> dict[str, str]:
    """Return the headers by which clients know whether to send a request again."""
    return {"retry-after": "1"} if status == 503 else NO_RETRY


def dialect_of(scope: Scope) -> Dialect:
    """Return the dialect of the client of any request: that of its path, or of its headers where several vendors have
    the path."""
    path = scope["path"]
    path = _KEY.sub("", path, count=1) if "/k/" in path else path
    if "/messages" in path:
        return Messages()
    if "/responses" in path:
        return Responses()
    if "/chat/completions" in path:
        return ChatCompletions()
    headers = Headers(scope=scope)
    if "/v1beta/" in path or "x-goog-api-key" in headers or scope["method"] == "POST" and "/models/" in path:
        return Gemini()
    return Messages() if "anthropic-version" in headers else ChatCompletions()


def from_elsewhere(scope: Scope, problem: BadInput) -> Response:
    """Return the refusal of a web page of another site, or of a name that leads here."""
    return _written(dialect_of(scope), ClientError(status=403, message=str(problem)))


class Misdirected(BadInput):
    """Refusal of a request for a path, or by a method, that no endpoint has.

    Attributes:
        scope: of the request.
        status: of the answer.
        allowed: methods that the path has; empty where it has none.
    """

    def __init__(self, problem: BadInput, scope: Scope, status: int, allowed: str = "") -> None:
        super().__init__(str(problem))
        self.scope, self.status, self.allowed = scope, status, allowed


def directed(application: ASGIApp, tell: Callable[[Misdirected], Awaitable[None]]) -> ASGIApp:
    """Return an application that answers a misdirected request in the words of its client's vendor.

    Args:
        application: raises Misdirected for it.
        tell: is called with the refusal before it is answered.
    """

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await application(scope, receive, send)
        except Misdirected as error:
            await tell(error)
            response = _written(dialect_of(scope), ClientError(status=error.status, message=str(error)))
            if error.allowed:
                response.headers["allow"] = error.allowed
            await response(scope, receive, send)

    return answer


async def no_endpoint(scope: Scope, receive: Receive, send: Send) -> None:
    """Refuse a path that no endpoint has, such as that of a vendor's own compaction.

    Raises:
        Misdirected: in any case.
    """
    path, do = _KEY.sub("", scope["path"], count=1), "leave this request out"
    twice = VERSION_TWICE.match(path)
    if path.startswith("//"):
        do = "end the client's base URL without a slash"
    elif path in WITHOUT_VERSION:
        do = "end the client's base URL with /v1"
    elif twice is not None:
        do = f"leave {twice[0]} out of the client's base URL"
    raise Misdirected(refusal("path", "an endpoint of /openapi.json", repr(path), do), scope, 404)


class Endpoint(Route):
    """Route whose refusal of another method is raised, to be answered in the words of the client's vendor.

    Args:
        path: of requests.
        endpoint: answers one; it raises none of starlette's own errors, so nothing looks for them in each event.
        methods: that it takes.
    """

    def __init__(
        self, path: str, endpoint: Callable[[Request], Awaitable[Response]], *, methods: list[str] | None = None
    ) -> None:
        super().__init__(path, endpoint, methods=methods)

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            response = await endpoint(Request(scope, receive, send))
            await response(scope, receive, send)

        self.app = answer

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request at this path.

        Raises:
            Misdirected: it has another method.
        """
        if not self.methods or scope["method"] in self.methods:
            await self.app(scope, receive, send)
        elif scope["method"] == "POST" and ":" in scope["path"]:
            await no_endpoint(scope, receive, send)  # Google's methods stand in the path
        else:
            allowed = ", ".join(sorted(self.methods))
            do = "send the request by one of these"
            raise Misdirected(refusal("method", allowed, scope["method"], do), scope, 405, allowed)


def identified(application: ASGIApp) -> ASGIApp:
    """Return an application whose answers each have an id, in the header that the client's vendor has for it."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        name = dialect_of(scope).request_id
        header = (name.encode(), f"req_{secrets.token_hex(12)}".encode())

        def sending(message: Message) -> Awaitable[None]:
            if name and message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), header]
            return send(message)

        await application(scope, receive, sending)

    return answer


def _written(dialect: Dialect, error: ClientError) -> Response:
    """Return an error in a dialect's words."""
    body = msgspec.json.encode(dialect.error(error))
    return Response(body, status_code=error.status, media_type="application/json", headers=retrying(error.status))
