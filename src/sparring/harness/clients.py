"""API clients that a harness's function receives; the names of its parameters decide which:

    async def agent(episode, openai_client): ...

`door` has the address and the API key, for any client. The other names stand for the vendors' asynchronous clients,
ready to use.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from sparring.errors import BadInput, boundary, refusal
from sparring.harness.preset import KEY
from sparring.harness.program import Address, OpenDoor
from sparring.protocols import Episode


@asynccontextmanager
async def _door(door: Address) -> AsyncIterator[Address]:
    yield door


def _uses_tls(door: Address) -> bool:
    """Return whether a session is reached by TLS. Only then are certificates loaded, which takes some 50 ms of the
    run's loop."""
    return door.url.startswith("https")


@asynccontextmanager
async def _openai(door: Address) -> AsyncIterator[Any]:
    package = importlib.import_module("openai")
    sender = package.DefaultAsyncHttpxClient(verify=_uses_tls(door))
    async with package.AsyncOpenAI(base_url=f"{door.url}/v1", api_key=door.key, http_client=sender) as client:
        yield client


@asynccontextmanager
async def _anthropic(door: Address) -> AsyncIterator[Any]:
    package = importlib.import_module("anthropic")
    sender = package.DefaultAsyncHttpxClient(verify=_uses_tls(door))
    async with package.AsyncAnthropic(base_url=door.url, api_key=door.key, http_client=sender) as client:
        yield client


@asynccontextmanager
async def _google(door: Address) -> AsyncIterator[Any]:
    genai = importlib.import_module("google.genai")
    arguments = {"verify": _uses_tls(door)}
    options = {"base_url": door.url, "client_args": arguments, "async_client_args": arguments}
    client = genai.Client(api_key=door.key, http_options=options).aio
    try:
        yield client
    finally:
        await client.aclose()


CLIENTS: dict[str, tuple[str, Callable[[Address], Any]]] = {
    "door": ("", _door),
    "openai_client": ("openai", _openai),
    "anthropic_client": ("anthropic", _anthropic),
    "google_client": ("google.genai", _google),
}
"""Package and factory of each client, by parameter name."""


def clients_of(function: Callable[..., Any], name: str) -> tuple[str, ...]:
    """Return the clients that a harness's function takes in addition to the episode. `name` is the function's in the
    recipe.

    Raises:
        BadInput: a parameter is not in `CLIENTS`, or its package is not installed.
    """
    empty = inspect.Parameter.empty
    parameters = [each for each in inspect.signature(function).parameters.values() if each.kind not in (2, 4)]
    names = tuple(each.name for each in parameters[1:] if each.default is empty or each.name in CLIENTS)
    for client in names:
        if client not in CLIENTS:
            expected = f"the episode, and parameters of the names {', '.join(CLIENTS)}"
            raise refusal(KEY, expected, f"{name} with the parameter {client!r}", "rename it or give it a default")
        package = CLIENTS[client][0]
        if package:
            root = {"google.genai": "google-genai"}.get(package, package)
            with boundary(BadInput, KEY, f"the package {root}, for {name}'s parameter {client}", f"pip install {root}"):
                importlib.import_module(package)
    return names


async def with_clients(
    function: Callable[..., Awaitable[None]], names: Sequence[str], open_door: OpenDoor, episode: Episode
) -> None:
    """Run a function with its clients, and close them afterwards."""
    async with AsyncExitStack() as stack:
        with episode.queue():  # the wait for the gateway has no time limit
            door = await stack.enter_async_context(open_door(episode.session()))
        clients = {name: await stack.enter_async_context(CLIENTS[name][1](door)) for name in names}
        await function(episode, **clients)
