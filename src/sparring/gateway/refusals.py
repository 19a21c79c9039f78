"""Errors in the words of the vendor whose client gets them."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from sparring.errors import BadInput, LimitReached, PolicyFailure, SparringError, refusal
from sparring.gateway.dialects.chat_completions import ChatCompletions
from sparring.gateway.dialects.dialect import NO_RETRY, Dialect
from sparring.gateway.dialects.gemini import Gemini
from sparring.gateway.dialects.messages import Messages
from sparring.gateway.keys import WrongKey
from sparring.gateway.models import UnknownModel


def refused(dialect: Dialect, error: SparringError) -> Response:
    """Return the refusal of a request in a dialect's words. A `LimitReached` says how much too long its prompt was."""
    status, message, headers = status_of(error)
    too_long = error.too_long if isinstance(error, LimitReached) else None
    body = msgspec.json.encode(dialect.error(status, message, too_long=too_long))
    return Response(body, status_code=status, media_type="application/json", headers=headers)


def status_of(error: SparringError) -> tuple[int, str, dict[str, str]]:
    """Return the status, the text and the headers of an error."""
    if isinstance(error, WrongKey):
        return 401, str(error), NO_RETRY
    if isinstance(error, UnknownModel):
        return 404, str(error), NO_RETRY
    if isinstance(error, (BadInput, PolicyFailure)):
        return 400, str(error), NO_RETRY
    return 503, str(error), {"retry-after": "1"}


def dialect_of(request: Request) -> Dialect:
    """Return the dialect of a client at an endpoint that several vendors have."""
    if "/v1beta/" in request.url.path or "x-goog-api-key" in request.headers:
        return Gemini()
    return Messages() if "anthropic-version" in request.headers else ChatCompletions()


WITHOUT_VERSION = frozenset(("/chat/completions", "/responses", "/models", "/messages"))
"""Paths that a client asks for whose base URL lacks the version."""


async def no_endpoint(scope: Scope, receive: Receive, send: Send) -> None:
    """Refuse a path that no endpoint has, such as that of a vendor's own compaction."""
    request = Request(scope)
    path = request.url.path
    do = "end the client's base URL with /v1" if path in WITHOUT_VERSION else "leave this request out"
    text = str(refusal("path", "an endpoint of /openapi.json", repr(path), do))
    body = msgspec.json.encode(dialect_of(request).error(404, text))
    response = Response(body, status_code=404, media_type="application/json", headers=NO_RETRY)
    await response(scope, receive, send)
