"""`RemoteEngine`: an engine in another process (`sparring serve`) that receives the run's weights."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace

import torch

from sparring.engine import wire
from sparring.engine.adapters.remote_client import RemoteClient
from sparring.engine.update import check_model
from sparring.errors import EngineError, boundary
from sparring.types import WeightRef
from sparring.weights.fetch import fetch
from sparring.weights.shared_memory import TRANSPORT, published

Initial = Callable[[], tuple[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor] | None]]
"""Function that returns the weights that a run begins with, and those of its adapter."""


class RemoteEngine(RemoteClient):
    """Client of `sparring serve` for the run whose weights it serves: this client sends them. Implements `Engine`.

    Attributes:
        initial: function that loads the weights of version 0 for a server that was restarted; None: it cannot be served
            again before the next run.
    """

    initial: Initial | None = None

    def begin(self, state: Mapping[str, torch.Tensor], adapter: Mapping[str, torch.Tensor] | None = None) -> None:
        """Send weights that count as version 0 from now on, whatever number the server gives them. Blocks.

        Args:
            adapter: weights of the adapter that the run trains, if any.

        Raises:
            WeightsError: the server refused the weights.
            EngineError: the server did not answer.
        """
        where = f"engine at {self.url}: weights"
        with boundary(EngineError, where), self._blocking(None) as client:
            # an earlier run may have left its adapter, and then the base model cannot change; without one the server
            # answers with an error, which is ignored
            answer = client.post("/v1/drop", content=wire.encode(wire.DropForm(adapter=self.served.model)))
        number = max(self.served.version, int(answer.headers.get(wire.VERSION, -1))) + 1
        self._have(where, number, state, None)
        if adapter is not None:
            self._have(where, number, adapter, self.served.model)
        self._newest = number

    async def pull(self, ref: WeightRef) -> None:
        """Send other weights: publish them in shared memory until the server has copied and verified them.

        Raises:
            WeightsError: the update was refused; the engine keeps serving the old version.
            EngineError: the server did not answer; its version is unknown.
        """
        check_model(ref, self._name)
        adapter = self.served.model if ref.adapter == self._name else ref.adapter
        sent = replace(ref, model=self.served.model, version=ref.version + self._base, adapter=adapter)
        self._newest = max(self._newest or 0, sent.version)
        async with _lent(sent) as lent:
            await self._post("weights", wire.weight_form(lent, self._base), adopts=True)
        self._counts.updated()

    async def restore(self) -> None:
        """Send version 0 to a server that was restarted.

        Raises:
            WeightsError: the server refused the weights.
            EngineError: the server did not answer, or these weights are not there any more.
        """
        if self.initial is None:
            raise EngineError(f"{self.place}: expected the same server, got a restarted one; start the run again")
        state, adapter = await asyncio.to_thread(self.initial)
        await asyncio.to_thread(self.begin, state, adapter)

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
        else:  # the caller has left, but the copy is still being made
            lending.add_done_callback(lambda _: stack.close())
