"""A gateway in a process of its own: it answers programs, and the run's process samples and records."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path

import uvicorn

from sparring.errors import BadInput, InfraError, refusal
from sparring.gateway.link import SOCKET
from sparring.gateway.remote_session import GatewayLink
from sparring.gateway.server import Gateway

GRACE_S = 1


def serve_gateway(folder: Path, host: str, port: int, ready: Callable[[str], None]) -> None:
    """Answer programs for the rollouts of a run until the process is interrupted.

    Args:
        folder: of the run, which is going on.
        host: address to listen on.
        port: to listen on; 0 takes a free one.
        ready: told the address when requests are answered.

    Raises:
        BadInput: no such run is going on, or the address is taken.
        KeyboardInterrupt: the user stopped it.
    """
    if not (folder / SOCKET).is_socket():
        do = "start the run first, with the address of this gateway as rollout.gateway"
        raise refusal(str(folder), "a run that is going on and has a gateway", f"no {SOCKET} in it", do)
    try:
        family, *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError, UnicodeError) as error:
        raise refusal(f"{host}:{port}", "a free address", str(error), "choose another --host or --port") from error
    shown = f"[{host}]" if family == socket.AF_INET6 else host
    with listening:
        asyncio.run(_serve(folder, listening, lambda: ready(f"http://{shown}:{listening.getsockname()[1]}")))


async def _serve(folder: Path, listening: socket.socket, ready: Callable[[], None]) -> None:
    link = GatewayLink(folder)
    try:
        await link.begin()
    except InfraError as error:
        raise BadInput(
            str(refusal(str(folder), "a run that is going on", str(error), "start the run first"))
        ) from error
    options = uvicorn.Config(
        Gateway(link).application(),
        log_level="warning",
        lifespan="off",
        access_log=False,
        timeout_graceful_shutdown=GRACE_S,
        ws="none",
    )
    ready()
    await uvicorn.Server(options).serve(sockets=[listening])
    await link.close()
