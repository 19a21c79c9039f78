"""Responses to errors, in the format of the client's vendor."""

from __future__ import annotations

import re
import secrets
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
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

Answer = Callable[[Request], Awaitable[Response]]

_KEY = re.compile(r"/k/[^/]+(?=/)")
"""Path prefix that contains the key."""

VERSION_TWICE = re.compile(r"/v1(?:beta)?(?=/v1(?:beta)?/)")
"""Path prefix of a client whose base URL already ends with the version that the client adds."""

WITHOUT_VERSION = frozenset(("/chat/completions", "/responses", "/models", "/messages"))
"""Paths of a client whose base URL lacks the version."""

_FIELDS = frozenset(("tools",))
"""Values of `BadInput.where` in a renderer's refusals that are request fields in every dialect."""


class RefusedField(BadInput):
    """Refusal of a field of a request; `where` is the field."""


def read_request(dialect: Dialect, call: ClientCall) -> ClientRequest:
    """Read a request in a dialect.

    Raises:
        RefusedField: the request is malformed or cannot be obeyed.
    """
    try:
        return dialect.read(call)
    except BadInput as error:
        raise RefusedField(str(error), error.where) from error


def refusal_response(dialect: Dialect, error: SparringError) -> Response:
    """Return the response to a refused request in a dialect. A `LimitReached` includes the length of the prompt."""
    return _error_response(dialect, client_error(error))


def client_error(error: SparringError) -> ClientError:
    """Convert an error to the form in which its client sees it."""
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


def retry_headers(status: int) -> dict[str, str]:
    """Return the headers that tell clients whether to retry a request."""
    return {"retry-after": "1"} if status == 503 else NO_RETRY


def dialect_of(scope: Scope) -> Dialect:
    """Return the dialect of the client of any request, by its path, or by its headers for paths that several vendors
    share."""
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


def foreign_page_refusal(scope: Scope, problem: BadInput) -> Response:
    """Return the response to a request from a web page of another site."""
    return _error_response(dialect_of(scope), ClientError(status=403, message=str(problem)))


class Misdirected(BadInput):
    """Refusal of a request whose path or method no endpoint has.

    Attributes:
        scope: scope of the request.
        status: status of the response.
        allowed: methods that the path accepts; empty for an unknown path.
    """

    def __init__(self, problem: BadInput, scope: Scope, status: int, allowed: str = "") -> None:
        super().__init__(str(problem))
        self.scope, self.status, self.allowed = scope, status, allowed


def answering_misdirected(application: ASGIApp, tell: Callable[[Misdirected], None]) -> ASGIApp:
    """Return an application that answers misdirected requests in the format of the client's vendor.

    Args:
        tell: function that is called with each refusal before it is sent.
    """

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await application(scope, receive, send)
        except Misdirected as error:
            tell(error)
            response = _error_response(dialect_of(scope), ClientError(status=error.status, message=str(error)))
            if error.allowed:
                response.headers["allow"] = error.allowed
            await response(scope, receive, send)

    return answer


async def no_endpoint(scope: Scope, receive: Receive, send: Send) -> None:
    """Refuse an unknown path, such as the path of a vendor's own compaction.

    Raises:
        Misdirected: always.
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


def json_response(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a response with a JSON body."""
    return Response(msgspec.json.encode(body), status_code=status, media_type="application/json", headers=headers)


def refuse_in_dialect(request: Request, error: SparringError) -> Response:
    """Return the response to a refused request in the dialect of its client."""
    return refusal_response(dialect_of(request.scope), error)


class Endpoint(Route):
    """Route that answers errors, and clients that left with status 499. It raises `Misdirected` for a wrong method, so
    that the refusal has the format of the client's vendor.

    Args:
        endpoint: function that answers a request. It raises none of starlette's own exceptions, so requests skip
            starlette's exception handling.
        refuse: function that makes the response to an error.
    """

    def __init__(
        self,
        path: str,
        endpoint: Answer,
        *,
        methods: list[str] | None = None,
        refuse: Callable[[Request, SparringError], Response] = refuse_in_dialect,
    ) -> None:
        super().__init__(path, endpoint, methods=methods)

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            request = Request(scope, receive, send)
            try:
                response = await endpoint(request)
            except ClientDisconnect:
                response = Response(status_code=499)
            except SparringError as error:
                response = refuse(request, error)
            await response(scope, receive, send)

        self.app = answer

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request for this path.

        Raises:
            Misdirected: the method is not allowed.
        """
        if not self.methods or scope["method"] in self.methods:
            await self.app(scope, receive, send)
        elif scope["method"] == "POST" and ":" in scope["path"]:
            await no_endpoint(scope, receive, send)  # in Google's paths the method follows a colon
        else:
            allowed = ", ".join(sorted(self.methods))
            do = "send the request by one of these"
            raise Misdirected(refusal("method", allowed, scope["method"], do), scope, 405, allowed)


def with_request_ids(application: ASGIApp) -> ASGIApp:
    """Return an application that adds a request id to every response, in the header that the client's vendor uses."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        name = dialect_of(scope).request_id
        header = (name.encode(), f"req_{secrets.token_hex(12)}".encode())

        def sending(message: Message) -> Awaitable[None]:
            if name and message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), header]
            return send(message)

        await application(scope, receive, sending)

    return answer


def _error_response(dialect: Dialect, error: ClientError) -> Response:
    return json_response(dialect.error(error), error.status, retry_headers(error.status))
