"""Server of OpenAI's chat completions with scripted replies, for tests of clients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from common.serving import ServingThread, free_socket, quiet_server
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

Reply = Callable[[dict[str, Any]], tuple[int, dict[str, Any]]]
"""Function of a request's body that returns status and body of the answer."""


class ChatServer(ServingThread):
    """Thread that serves scripted replies.

    Args:
        reply: function that answers each request, one at a time.

    Attributes:
        reply: replaceable function that answers requests.
        url: base URL, including /v1.
        bodies: bodies of all requests.
    """

    def __init__(self, reply: Reply) -> None:
        self.reply = reply
        self.bodies: list[dict[str, Any]] = []
        listening, root = free_socket()
        self.url = f"{root}/v1"
        application = Starlette(routes=[Route("/v1/chat/completions", self._answer, methods=["POST"])])
        super().__init__(quiet_server(application), listening)

    async def _answer(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        status, answer = self.reply(body)
        return JSONResponse(answer, status)


def message(content: str = "", *, finish_reason: str = "stop", **more: Any) -> tuple[int, dict[str, Any]]:
    """Return a successful answer with one message."""
    reply = {"role": "assistant", "content": content, **more}
    return 200, {"choices": [{"index": 0, "finish_reason": finish_reason, "message": reply}]}
