"""`RemoteEngine`: an engine in another process, behind `sparring serve`, that is given weights."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace

import torch

from sparring.engine import wire
from sparring.engine.adapters.remote_client import RemoteClient
from sparring.errors import EngineError, WeightsError, boundary
from sparring.types import WeightRef
from sparring.weights.fetch import fetch
from sparring.weights.shared_memory import TRANSPORT, published


class RemoteEngine(RemoteClient):
    """Client of the run that the server works for: it sends the weights. Implements `Engine`."""

    def begin(self, state: Mapping[str, torch.Tensor], adapter: Mapping[str, torch.Tensor] | None = None) -> None:
        """Have these weights served and call them version 0 from here on, whatever number the server gives them.
        Blocks.

        Args:
            adapter: of the one that the run trains, if any.

        Raises:
            WeightsError: the server refused them.
            EngineError: it did not answer.
        """
        where = f"engine at {self._url}: weights"
        with boundary(EngineError, where), self._blocking(None) as client:
            # the run before may have trained one, and then the model below it cannot change; an error says that there
            # is none
            answer = client.post("/v1/drop", content=wire.encode(wire.DropForm(adapter=self.served.model)))
        number = max(self.served.version, int(answer.headers.get(wire.VERSION, -1))) + 1
        self._have(where, number, state, None)
        if adapter is not None:
            self._have(where, number, adapter, self.served.model)
        self._newest = number

    async def pull(self, ref: WeightRef) -> None:
        """Have other weights served: publish them in shared memory until the server has copied and verified them.

        Raises:
            WeightsError: the update was refused; the engine keeps serving the old version.
            EngineError: the server did not answer; which version it serves is unknown.
        """
        where = f"weights of {ref.model} version {ref.version}"
        if ref.model != self._name:
            raise WeightsError(
                f"{where}: expected model {self._name!r}, got {ref.model!r}; publish to the engine that serves it"
            )
        adapter = self.served.model if ref.adapter == self._name else ref.adapter
        sent = replace(ref, model=self.served.model, version=ref.version + self._base, adapter=adapter)
        self._newest = max(self._newest or 0, sent.version)
        async with _lent(sent) as lent:
            await self._post("weights", wire.weight_form(lent, self._base), adopts=True)
        self._counts.updated()

    def _have(self, where: str, version: int, state: Mapping[str, torch.Tensor], adapter: str | None) -> None:
        with published(self.served.model, version, state, adapter=adapter) as ref, boundary(EngineError, where):
            with self._blocking(None) as client:
                answer = client.post("/v1/weights", content=wire.encode(wire.weight_form(ref, version)))
            self._check(answer.status_code, answer.content, answer.headers, where, adopts=True)


@asynccontextmanager
async def _lent(ref: WeightRef) -> AsyncIterator[WeightRef]:
    """Publish the same weights in shared memory while the context lasts."""
    if ref.transport == TRANSPORT:
        yield ref
        return
    stack = ExitStack()

    def lend() -> WeightRef:
        return stack.enter_context(published(ref.model, ref.version, fetch(ref), ref.probe, adapter=ref.adapter))

    lending = asyncio.ensure_future(asyncio.to_thread(lend))
    try:
        yield await asyncio.shield(lending)
    finally:
        if lending.done():
            stack.close()
        else:  # nobody waits any longer, but the copy is still being made
            lending.add_done_callback(lambda _: stack.close())
