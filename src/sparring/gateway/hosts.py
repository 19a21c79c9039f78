"""Protection against web pages: a browser sends the requests of any page to any address of its machine, and lets the
page read the answer if the page's own host name resolves to that address (DNS rebinding).

A page can forge neither its own `Origin` nor the `Host` that it calls. Endpoints without a key therefore refuse
requests from the origin of another site, and requests to a host name that is not this server's. Numeric addresses are
allowed as hosts, because DNS rebinding needs a name. The tools of a world check the origin under any key, as the
specification of MCP demands.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Collection
from functools import cache
from urllib.parse import urlsplit

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from sparring.errors import BadInput, refusal
from sparring.gateway.keys import HEADERS

Refuse = Callable[[Scope, BadInput], ASGIApp]


def at_home(
    application: ASGIApp, refuse: Refuse, *, keyed: Callable[[Scope], bool], names: Collection[str] = ()
) -> ASGIApp:
    """Return an application that refuses requests of foreign web pages unless a key protects the endpoint.

    Args:
        refuse: function that makes the response to a refused request, with status 403.
        keyed: function that tells whether a request carries a key that the application checks.
        names: additional host names of this server.
    """
    own = frozenset(name.lower() for name in names)

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        problem = _problem(scope, keyed(scope), own) if scope["type"] == "http" else None
        await (application if problem is None else refuse(scope, problem))(scope, receive, send)

    return answer


def plainly(scope: Scope, problem: BadInput) -> ASGIApp:
    """Return a refusal as plain text."""
    return Response(str(problem), status_code=403)


def shows_key(scope: Scope) -> bool:
    """Return whether a request carries a key, valid or not."""
    query = scope["query_string"]
    return (
        not HEADERS.isdisjoint([name for name, _ in scope["headers"]])
        or scope["path"].startswith("/k/")
        or query.startswith(b"key=")
        or b"&key=" in query
    )


def _problem(scope: Scope, keyed: bool, own: frozenset[str]) -> BadInput | None:
    """Return the refusal of a request; None if the request is allowed."""
    tools = scope["path"].endswith("/mcp")
    if keyed and not tools or scope["server"] is None or scope["server"][1] is None:
        return None  # web pages cannot reach a socket in the file system
    here = own | {scope["server"][0]}
    do = "ask from a program, or give the server a key and send it"
    for name, value in scope["headers"]:
        if name == b"origin" and not _is_own(_host(_text(value)), here):
            return refusal("Origin", "none, or an address of this server", repr(_text(value)), do)
        host = _host(f"//{_text(value)}") if name == b"host" and not keyed else ""
        if host != "" and not _is_own(host, here) and _address(host or "") is None:
            return refusal("Host", "an address of this server", repr(_text(value)), do)
    return None


def _is_own(host: str | None, own: Collection[str]) -> bool:
    if not host:
        return False
    host = host.lower().rstrip(".")
    if host == "localhost" or host.endswith(".localhost") or host in own or host == _host_name():
        return True
    address = _address(host)
    return address is not None and address.is_loopback


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _host(url: str) -> str | None:
    """Return the host of a URL, or None if the URL has no host, such as the origin `null`."""
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None


def _text(value: bytes) -> str:
    return value.decode("latin-1")


@cache
def _host_name() -> str:
    return socket.gethostname().lower()
