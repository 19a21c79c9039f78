"""Gateway in a process of its own: it passes the connections of agent programs on to the run's process."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from pathlib import Path

from sparring.errors import BadInput, InfraError, refusal
from sparring.gateway.proxy import ProxyServer, RunSocket
from sparring.gateway.run_socket import SOCKET, Word

AGAIN_S = 1.0
"""Seconds between two attempts to find the process that resumes a run."""


def serve_gateway(folder: Path, host: str, port: int, say: Callable[[str], None]) -> None:
    """Serve agent programs for the rollouts of a run until it is over. If the run's process ends early, programs are
    told to retry until another process resumes the run.

    Args:
        folder: folder of the run, which must be running.
        port: port to listen on; 0 takes a free one.
        say: called with sentences for the user; the first names the address, once requests are answered.

    Raises:
        BadInput: the run is not running, or the address is taken.
        InfraError: another gateway has replaced this one.
    """
    if not (folder / SOCKET).is_socket():
        do = "start the run first, with the address of this gateway as rollout.gateway.url"
        raise refusal(str(folder), "a run that is going on and has a gateway", f"no {SOCKET} in it", do)
    try:
        family, *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError, UnicodeError) as error:
        raise refusal(f"{host}:{port}", "a free address", str(error), "choose another --host or --port") from error
    shown = f"[{host}]" if ":" in host else host
    with listening:
        asyncio.run(_serve(folder, listening, f"http://{shown}:{listening.getsockname()[1]}", say))


async def _serve(folder: Path, listening: socket.socket, url: str, say: Callable[[str], None]) -> None:
    run = RunSocket(folder)
    try:
        words = run.words()
        await anext(words)
    except InfraError as error:
        raise BadInput(
            str(refusal(str(folder), "a run that is going on", str(error), "start the run first"))
        ) from error
    say(f"gateway of {folder} on {url}")
    server = ProxyServer(run)
    attending = asyncio.create_task(_attend(run, words, say))
    attending.add_done_callback(lambda task: setattr(server, "should_exit", True))
    try:
        await server.serve(sockets=[listening])
        followed = attending.done() and attending.result() is Word.FOLLOWED
    finally:
        attending.cancel()
        await asyncio.gather(attending, return_exceptions=True)
        run.close()
    if followed:
        raise InfraError(f"{folder}: another gateway has begun for this run, and answers in the place of this one")
    say(f"{folder}: the run is over")


async def _attend(run: RunSocket, words: AsyncGenerator[Word], say: Callable[[str], None]) -> Word:
    """Return the last message of a run, over all processes that resume it.

    Args:
        run: socket of the run.
        words: messages of the run's process after the first.
        say: called with sentences for the user.
    """
    there = True
    while True:
        with suppress(InfraError):
            async with aclosing(words):  # else it would be closed at the same time as its source
                async for word in words:
                    if word is not Word.BEGUN:
                        return word
                    there = True
                    say("the run goes on")
        if there:
            say("the run's process has ended; programs are answered again when the run goes on")
        there = False
        await asyncio.sleep(AGAIN_S)
        words = run.words()
