"""`RemoteEngine`: an engine in another process (`sparring serve`) that receives the run's weights."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch

from sparring.engine import wire
from sparring.engine.adapters.remote_client import RemoteClient
from sparring.engine.adapters.weight_sender import GRACE_S, WeightSender, late
from sparring.engine.update import check_model
from sparring.errors import BadInput, EngineError, SparringError, WeightsError, boundary
from sparring.types import WeightRef
from sparring.weights import files
from sparring.weights.fetch import fetch
from sparring.weights.fetch import links as transport_links
from sparring.weights.inline import reference
from sparring.weights.links import Link, WeightLinks

T = TypeVar("T")

Join = Callable[["RemoteEngine"], None]
"""Function that adds a server to a run: it checks the server, and sends the server the run's first weights."""


class RemoteEngine(RemoteClient):
    """Client of a `sparring serve` that serves a run's weights, which this client sends. Implements `Engine`. The other
    arguments, and the errors, are those of `RemoteClient`.

    Args:
        links: weight links of the run, shared by its engines and closed by the caller; None: own links.
        timeout_s: `engine.update.timeout_s`, the time limit of an update in seconds.
        join: function that is called with this engine when the server was restarted; None: a restarted server cannot be
            used in this run.
        awaited: whether the server may start later; `join` then makes it an engine of the run.
    """

    def __init__(
        self,
        url: str,
        *,
        name: str = "policy",
        api_key: str = "",
        links: WeightLinks | None = None,
        timeout_s: float = 300.0,
        join: Join | None = None,
        awaited: bool = False,
    ) -> None:
        super().__init__(url, name=name, api_key=api_key, awaited=awaited)
        self._links = links or transport_links()
        self._timeout_s = timeout_s
        self._link: Link | None = None
        self._join = join

    @property
    def continues(self) -> bool:
        """Whether another engine can continue a turn that this engine has begun."""
        return self.served.kind == "native"

    def choose_link(self) -> str:
        """Choose the link over which weights travel to this server, and return the link's description. Blocks. Raises
        as `begin`, and WeightsError if the server can use no link."""
        self._link = self._links.choose(self._sender(), f"engine at {self.url}")
        return self._link.about

    def send_files(self, folder: Path, dtype: str, numerics: str) -> tuple[str, ...]:
        """Make a server that was started without a model open the model of a checkpoint folder, in the run's dtype and
        numerics, unless it has this model already. The weights are sent later. Blocks.

        Returns:
            Names of the sent files; empty if the server has the model already.

        Raises:
            BadInput: the folder lacks a file, or the server cannot read the folder `engine.shared_folder`.
            WeightsError: the server refused the files, or did not answer in time.
            EngineError: the server did not answer.
        """
        served = self.served
        if served.files is None:
            return ()
        found = files.read(folder)
        wanted = (files.digest(found), dtype, numerics == "fast")
        if (served.files, served.dtype, served.numerics == "fast") == wanted:
            return ()
        sender = self._sender()
        with self._sent(reference(files.MODEL, 0, files.tensors(found)), sender) as ref:
            sender.post("files", wire.encode(wire.files_form(ref, dtype, numerics)))
        self.ask()
        return tuple(found)

    def begin(self, state: Mapping[str, torch.Tensor], adapter: Mapping[str, torch.Tensor] | None = None) -> None:
        """Send the weights `state`, and the weights of the adapter that the run trains, if any. They count as version 0
        from now on, whatever their version number at the server. Blocks.

        Raises:
            BadInput: the server cannot read the folder `engine.shared_folder`.
            WeightsError: the server refused the weights, or did not acknowledge them in time, which leaves its version
                unknown.
            EngineError: the server did not answer.
        """
        # an earlier run may have left its adapter, and then the base model cannot change; without one the server
        # answers with an error, which is ignored
        answer = self._sender().ask("drop", wire.encode(wire.DropForm(adapter=self.served.model)))
        with boundary(EngineError, self._where):
            number = max(self.served.version, int(answer.headers.get(wire.VERSION, -1))) + 1
        states = {None: state} if adapter is None else {None: state, self.served.model: adapter}
        for kind, tensors in states.items():
            sender = self._sender()
            with self._sent(reference(self.served.model, number, tensors, adapter=kind), sender) as ref:
                verb = "wake" if kind is None else "weights"  # an earlier run may have left it asleep
                answer = sender.post(verb, wire.encode(wire.weight_form(ref, number)))
            with boundary(EngineError, self._where):
                self._check(answer.status, answer.body, answer.headers, self._where, adopts=True)
            self._check_served(number, number)
        self._newest = number

    async def pull(self, ref: WeightRef) -> None:
        await self._take(ref, "weights")

    async def wake(self, ref: WeightRef) -> None:
        await self._take(ref, "wake")

    async def _take(self, ref: WeightRef, verb: str) -> None:
        """Send new weights over a link that the server can use, and wait until the server has verified and acknowledged
        them. Raises WeightsError if the server refused them, and so serves the old ones, acknowledged another version,
        or did not acknowledge them in time: its version is then unknown until it answers again."""
        check_model(ref, self._name)
        adapter = self.served.model if ref.adapter == self._name else ref.adapter
        sent = replace(ref, model=self.served.model, version=ref.version + self._base, adapter=adapter)
        self._newest = max(self._newest or 0, sent.version)
        sender = self._sender()
        try:
            async with asyncio.timeout(self._timeout_s + GRACE_S):
                async with _in_thread(self._sent(sent, sender), sender.cancel) as there:
                    await self._post(verb, wire.weight_form(there, self._base), adopts=True)
        except TimeoutError:
            raise late(self._where, self._timeout_s) from None
        except BadInput as error:  # a folder that the run began with is of no use any more
            raise WeightsError(str(error)) from error
        if adapter in (None, self.served.model):
            self._check_served(sent.version, sent.version - ref.version)
        self._counts.updated()

    async def restore(self) -> None:
        """Make a server that was restarted, or that started late, an engine of the run. Raises WeightsError if the
        server refused the weights. Raises EngineError if the server did not answer, its numerics differ from the run's,
        or the files of version 0 are gone."""
        if self._join is None:
            raise EngineError(f"{self.place}: expected the same server, got a restarted one; start the run again")
        try:
            await asyncio.to_thread(self.ask)
            await asyncio.to_thread(self._join, self)
        except BadInput as error:
            raise EngineError(str(error)) from error

    def _check_served(self, version: int, base: int) -> None:
        if (self._version, self._base) != (version, base):
            served = f"{self._version} of one that began at {self._base}; use one server per run"
            expected = f"version {version} of a run that began at {base}, as acknowledged"
            raise WeightsError(f"{self._where}: expected {expected}, got {served}")

    @property
    def _where(self) -> str:
        return f"engine at {self.url}: weights"

    def _sender(self) -> WeightSender:
        return WeightSender(self.url, self._headers, self._timeout_s)

    @contextmanager
    def _sent(self, ref: WeightRef, sender: WeightSender) -> Iterator[WeightRef]:
        """Publish and send weights; yield the reference that the server fetches. Blocks."""
        inline = ref if ref.transport == "inline" else replace(ref, transport="inline", location=fetch(ref))
        link = self._link or self._links.choose(sender, f"engine at {self.url}")
        try:
            with self._links.published(link, inline) as published:
                yield link.send(published, sender)
            self._link = link
        except SparringError:
            self._link = None  # the server may have gone to another machine
            raise


@asynccontextmanager
async def _in_thread(context: AbstractContextManager[T], cancel: Callable[[], None]) -> AsyncIterator[T]:
    """Enter and leave a blocking context in a thread. If the caller is cancelled meanwhile, the context is left as soon
    as it has been entered; `cancel` is called to hasten this."""
    loop, stack = asyncio.get_running_loop(), ExitStack()
    entering = asyncio.ensure_future(asyncio.to_thread(stack.enter_context, context))
    try:
        entered = await asyncio.shield(entering)
    except asyncio.CancelledError:
        cancel()
        entering.add_done_callback(lambda done: done.exception() or loop.run_in_executor(None, stack.close))
        raise
    try:
        yield entered
    finally:
        await asyncio.to_thread(stack.__exit__, *sys.exc_info())
