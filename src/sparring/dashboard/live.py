"""Live page of a run: curves that follow the run, and its rollouts with search and links."""

from __future__ import annotations

import asyncio
import hmac
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route

from sparring.dashboard.index import RolloutIndex, find
from sparring.dashboard.page_data import figures, read_config, shares, used_pieces, vocabulary
from sparring.dashboard.report import embedded_json, open_store, page
from sparring.errors import BadInput
from sparring.gateway.serving import BoundedServer, listen_on, server_settings, url_of
from sparring.protocols import Store

LOCAL = ("127.0.0.1", "localhost", "[::1]")
ROWS = 200
"""Maximum number of rollouts per answer; the page asks for more."""


class LivePage:
    """Page of a run for readers with its `key`. It reads the run's folder and writes nothing.

    Args:
        host: host name of the server, in addition to this machine's local names.
    """

    def __init__(self, folder: Path, host: str, key: str) -> None:
        open_store(folder).close()
        self._folder, self._key = folder, key
        self._hosts = {*LOCAL, host, f"[{host}]"}
        self._index, self._one_at_a_time = RolloutIndex(), threading.Lock()
        self._pieces: dict[int, Any] = {}

    def application(self) -> Starlette:
        """Return the page as an ASGI application."""
        doors = {"/": self._page, "/figures": self._figures, "/rollouts": self._rollouts, "/rollout": self._rollout}
        return Starlette(routes=[Route(path, self._guard(door)) for path, door in doors.items()])

    def _guard(self, door: Callable[[Request], Response]) -> Callable[[Request], Any]:
        """Require the key, and one of this server's host names, so that no foreign page can read it (DNS rebinding)."""

        async def answer(request: Request) -> Response:
            host, port = _address(request)
            if host is None or not {host, f"[{host}]"} & self._hosts:
                return PlainTextResponse("expected the address that this page is served under, got another", 421)
            cookie = f"sparring_{port}"  # cookies ignore ports, and a reader may look at two runs
            in_address = request.query_params.get("key")
            if not hmac.compare_digest((in_address or request.cookies.get(cookie, "")).encode(), self._key.encode()):
                return PlainTextResponse(
                    "expected the key of this page; open the address that the command printed", 401
                )
            if in_address is None:
                return await run_in_threadpool(door, request)
            welcome = RedirectResponse(request.url.replace(query="").path, 303)
            welcome.set_cookie(cookie, self._key, httponly=True, samesite="strict")
            return welcome

        return answer

    @contextmanager
    def _reading(self) -> Iterator[Store]:
        with self._one_at_a_time, closing(open_store(self._folder)) as store:
            self._index.update(store)
            yield store

    def _page(self, request: Request) -> Response:
        return HTMLResponse(page(self._page_data(), live=True), headers={"Cache-Control": "no-store"})

    def _figures(self, request: Request) -> Response:
        stamp = self._stamp()
        if request.query_params.get("seen") == stamp:
            return Response(status_code=204)
        return _json(self._page_data())

    def _page_data(self) -> dict[str, Any]:
        """Return the page's data without the rollouts. The stamp is taken first, so that the next poll sees later
        changes."""
        stamp = self._stamp()
        with self._reading() as store:
            return {
                **figures(self._folder, store),
                "outcomes": shares(self._index.outcomes()),
                "rollouts": [],
                "rollouts_seen": len(self._index),
                "axes": self._index.axes(),
                "pieces": {},
                "stamp": stamp,
                "live": True,
            }

    def _stamp(self) -> str:
        """Return a stamp of the run's files that changes with them."""
        files = [self._folder / name for name in ("store.sqlite", "store.sqlite-wal", "summary.json")]
        statuses = [file.stat() for file in files if file.exists()]
        return "-".join(f"{status.st_mtime_ns:x}.{status.st_size:x}" for status in statuses)

    def _rollouts(self, request: Request) -> Response:
        query = dict(request.query_params)
        words, after = query.pop("words", ""), query.pop("after", "0")
        first = int(after[:12]) if after.isdecimal() else 0
        with self._reading():
            lines = self._index.lines()
        try:
            found = find(lines, query, words)
        except BadInput as error:
            return PlainTextResponse(str(error), 400)
        return _json({"found": len(found), "lines": found[first : first + ROWS], "all": len(lines)})

    def _rollout(self, request: Request) -> Response:
        _, config = read_config(self._folder)
        with self._reading() as store:
            self._pieces = self._pieces or vocabulary(self._folder, config)
            entry = self._index.open(store, config, request.query_params.get("id", ""))
        if entry is None:
            return PlainTextResponse("expected the id of a recorded rollout", 404)
        return _json({"rollout": entry, "pieces": used_pieces(self._pieces, [entry])})


def _address(request: Request) -> tuple[str | None, int]:
    """Return the host and port of a request; no host if its address is invalid."""
    try:
        return request.url.hostname, request.url.port or 80
    except ValueError:
        return None, 80


def _json(data: dict[str, Any]) -> Response:
    return Response(embedded_json(data), media_type="application/json", headers={"Cache-Control": "no-store"})


def serve_report(folder: Path, host: str, port: int, say: Callable[[str], None]) -> None:
    """Serve the page of a run, which may be active, until the process is interrupted.

    Args:
        port: port to listen on; 0: a free one.
        say: called with the page's address, including its key, once it is served.

    Raises:
        BadInput: the folder has no run, or the address is taken.
    """
    key = secrets.token_urlsafe(18)
    application = LivePage(folder, host, key).application()
    with listen_on(host, port, "choose another --host or --port") as listening:
        say(f"{url_of(host, listening)}/?key={key}")
        asyncio.run(BoundedServer(server_settings(application)).serve(sockets=[listening]))
