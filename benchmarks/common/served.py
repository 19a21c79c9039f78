"""Server of an engine in a thread of this process, for tests of its clients."""

from __future__ import annotations

import asyncio
import socket
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from common.serving import ServingThread, free_socket

from sparring.engine.adapters.remote import RemoteEngine
from sparring.launch.serve import ServeConfig, server_of

if TYPE_CHECKING:
    from sparring.engine.server import ServedEngine


class ServerThread(ServingThread):
    """Thread that serves an engine and closes it at the end.

    Args:
        engine: engine that is served, made from the checkpoint folder `folder`; None: clients send the model.
        folder: checkpoint folder; its tokenizer, if it has one, compiles constraints.
        api_key: key that clients must send.
        unix: path of a Unix socket to listen on, replaced if it exists; None: a free TCP port.

    Attributes:
        url: URL of the server.
    """

    def __init__(
        self, engine: ServedEngine | None, folder: Path, *, api_key: str = "", unix: Path | None = None
    ) -> None:
        if unix is None:
            listening, self.url = free_socket()
        else:
            unix.unlink(missing_ok=True)
            listening, self.url = socket.socket(socket.AF_UNIX), f"unix:{unix}"
            listening.bind(str(unix))
            listening.listen()
        ready = threading.Event()
        super().__init__(server_of(engine, ServeConfig(folder=folder, api_key=api_key), ready.set), listening)
        ready.wait()


class RemoteToThread(RemoteEngine):
    """Client with its own server, which ends with the client."""

    def __init__(self, engine: ServedEngine, folder: Path) -> None:
        self._thread = ServerThread(engine, folder)
        super().__init__(self._thread.url)

    async def close(self) -> None:
        """Close the client, then the server."""
        await super().close()
        await asyncio.to_thread(self._thread.stop)
