"""A real server that speaks OpenAI's chat completions, its replies made by a function: for tests of its clients."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

Reply = Callable[[dict[str, Any]], tuple[int, dict[str, Any]]]
"""A request's body -> the status and the body of the answer."""


class ChatServer:
    """Serves in a thread until it is stopped.

    Args:
        reply: called with every request, one at a time.

    Attributes:
        reply: as given; may be exchanged.
        url: where, up to and with /v1.
        bodies: the bodies of all requests.
    """

    def __init__(self, reply: Reply) -> None:
        self.reply = reply
        self.bodies: list[dict[str, Any]] = []
        listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
        application = Starlette(routes=[Route("/v1/chat/completions", self._answer, methods=["POST"])])
        self._server = uvicorn.Server(
            uvicorn.Config(application, log_level="warning", access_log=False, lifespan="off")
        )
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._server.serve(sockets=[listening])), daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Stop serving. Safe to call twice."""
        self._server.should_exit = True
        self._thread.join()

    async def _answer(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        status, answer = self.reply(body)
        return JSONResponse(answer, status)


def message(content: str = "", *, finish_reason: str = "stop", **more: Any) -> tuple[int, dict[str, Any]]:
    """Return a successful answer with one message."""
    reply = {"role": "assistant", "content": content, **more}
    return 200, {"choices": [{"index": 0, "finish_reason": finish_reason, "message": reply}]}
