"""Gateway in a process of its own: it passes its clients to the run's process, or answers them while there is none."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from sparring.errors import BadInput, InfraError, refusal
from sparring.gateway.refusals import dialect_of, refusal_response, with_request_ids
from sparring.gateway.run_socket import SOCKET, Word, connect_to_run, hand_over, next_word
from sparring.gateway.serving import BoundedServer, listen_on, server_settings, url_of

AGAIN_S = 1.0
"""Seconds between two attempts to find the process that resumes a run."""


def serve_gateway(folder: Path, host: str, port: int, say: Callable[[str], None]) -> None:
    """Serve agent programs for the rollouts of an active run until it is over. If the run's process ends early,
    programs are told to retry until another process resumes the run.

    Args:
        port: port to listen on; 0 takes a free one.
        say: called with sentences for the user; the first names the address, once requests are answered.

    Raises:
        BadInput: the run is not running, or the address is taken.
        InfraError: another gateway has replaced this one.
    """
    if not (folder / SOCKET).is_socket():
        advice = "start the run first, with the address of this gateway as rollout.gateway.url"
        raise refusal(str(folder), "a run that is going on and has a gateway", f"no {SOCKET} in it", advice)
    asyncio.run(_serve(folder, host, port, say))


async def _serve(folder: Path, host: str, port: int, say: Callable[[str], None]) -> None:
    try:
        control = await connect_to_run(folder)
    except InfraError as error:
        raise BadInput(
            str(refusal(str(folder), "a run that is going on", str(error), "start the run first"))
        ) from error
    with control, listen_on(host, port, "choose another --host or --port") as listening:
        begun = f"gateway of {folder} on {url_of(host, listening)}"
        server = BoundedServer(server_settings(_away()))
        attending = asyncio.create_task(_attend(folder, control, listening, server, begun, say))
        attending.add_done_callback(lambda task: setattr(server, "should_exit", True))
        try:
            await server.serve()
            followed = attending.done() and attending.result() is Word.FOLLOWED
        finally:
            attending.cancel()
            await asyncio.gather(attending, return_exceptions=True)
    if followed:
        raise InfraError(f"{folder}: another gateway has begun for this run, and answers in the place of this one")
    say(f"{folder}: the run is over")


async def _attend(
    folder: Path,
    control: socket.socket,
    listening: socket.socket,
    server: BoundedServer,
    begun: str,
    say: Callable[[str], None],
) -> Word:
    """Pass the socket `listening` to each process of the run in turn, and let `server` answer while no process runs.
    Return the run's last word. `begun` is the first sentence for the user."""
    there = True
    while True:
        with suppress(InfraError), control:
            await hand_over(control, listening)
            while (word := await next_word(control)) is Word.BEGUN:
                server.leave(listening)
                say(begun)
                there, begun = True, "the run goes on"
            return word
        server.attend(listening)
        if there:
            say("the run's process has ended; programs are answered again when the run goes on")
        there = False
        control = await _connect_again(folder)


async def _connect_again(folder: Path) -> socket.socket:
    """Wait for the process that resumes a run; return the connection to it."""
    while True:
        await asyncio.sleep(AGAIN_S)
        with suppress(InfraError):
            return await connect_to_run(folder)


def _away() -> ASGIApp:
    """Return the ASGI application that answers while the run's process is away."""
    error = InfraError("the run's process is away; send the request again")

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        response = refusal_response(dialect_of(scope), error)
        response.headers["connection"] = "close"  # the next request may reach the run
        await response(scope, receive, send)

    return with_request_ids(answer)
