"""Web pages at the door: a browser sends what any page wants to any address of its machine, and reads the answer where
a name of the page's own leads there (DNS rebinding).

A page cannot hide its `Origin`, nor the name by which it asks (`Host`). So where no key is asked for, a request is
refused whose origin is another site, or whose host is a name that is none of this server's: an address in digits is no
name, and leads nowhere else. The tools of a world want a known origin under any key, as MCP's specification demands.
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
    """Return an application that answers no web page of another site where no key protects it.

    Args:
        application: answers the rest.
        refuse: makes the answer to a request that is refused, which has status 403.
        keyed: whether a request has a key that the application asks for.
        names: further names of this server.
    """
    own = frozenset(name.lower() for name in names)

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        problem = _problem(scope, keyed(scope), own) if scope["type"] == "http" else None
        await (application if problem is None else refuse(scope, problem))(scope, receive, send)

    return answer


def plainly(scope: Scope, problem: BadInput) -> ASGIApp:
    """Return a refusal as text."""
    return Response(str(problem), status_code=403)


def shows_key(scope: Scope) -> bool:
    """Return whether a request shows a key, which may be wrong."""
    query = scope["query_string"]
    return (
        not HEADERS.isdisjoint([name for name, _ in scope["headers"]])
        or scope["path"].startswith("/k/")
        or query.startswith(b"key=")
        or b"&key=" in query
    )


def _problem(scope: Scope, keyed: bool, own: frozenset[str]) -> BadInput | None:
    """Return why a request is refused; None where it is not."""
    tools = scope["path"].endswith("/mcp")
    if keyed and not tools or scope["server"] is None or scope["server"][1] is None:
        return None  # what comes by a socket in the file system comes from no web page
    here = own | {scope["server"][0]}
    do = "ask from a program, or give the server a key and send it"
    for name, value in scope["headers"]:
        if name == b"origin" and not _is_own(_origin(_text(value)), here):
            return refusal("Origin", "none, or an address of this server", repr(_text(value)), do)
        host = _host(_text(value)) if name == b"host" and not keyed else ""
        if host != "" and not _is_own(host, here) and not _is_address(host):
            return refusal("Host", "an address of this server", repr(_text(value)), do)
    return None


def _is_own(host: str | None, own: Collection[str]) -> bool:
    """Return whether a host is this machine."""
    if not host:
        return False
    host = host.lower().rstrip(".")
    if host == "localhost" or host.endswith(".localhost") or host in own or host == _here():
        return True
    address = _address(host)
    return address is not None and address.is_loopback


def _is_address(host: str | None) -> bool:
    return host is not None and _address(host) is not None


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _origin(value: str) -> str | None:
    """Return the host of an origin; None for one that has none, such as `null`."""
    try:
        return urlsplit(value).hostname
    except ValueError:
        return None


def _host(value: str) -> str | None:
    """Return the host of a `Host` header, without its port."""
    try:
        return urlsplit(f"//{value}").hostname
    except ValueError:
        return None


def _text(value: bytes) -> str:
    return value.decode("latin-1")


@cache
def _here() -> str:
    return socket.gethostname().lower()
