"""Thread that serves HTTP on a real socket, for tests of clients."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable

import uvicorn
from starlette.applications import Starlette


class ServingThread:
    """Thread that serves until it is stopped.

    Args:
        server: server to run.
        listening: socket on which it serves.
        close: called when the server has ended, in its thread.
    """

    def __init__(
        self, server: uvicorn.Server, listening: socket.socket, close: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        async def serve() -> None:
            await server.serve(sockets=[listening])
            if close is not None:
                await close()

        self._server, self._thread = server, threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop serving like Ctrl-C: requests in progress end with an error. Safe to call twice."""
        self._server.should_exit = True
        self._thread.join()


def free_socket() -> tuple[socket.socket, str]:
    """Return a listening socket on a free TCP port, and the URL that reaches it."""
    listening = socket.create_server(("127.0.0.1", 0))
    return listening, f"http://127.0.0.1:{listening.getsockname()[1]}"


def quiet_server(application: Starlette) -> uvicorn.Server:
    """Return a server of an application that logs only warnings."""
    return uvicorn.Server(uvicorn.Config(application, log_level="warning", access_log=False, lifespan="off"))
