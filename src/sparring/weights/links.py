"""Links: transports of weights from a run to the servers of its engines, and the choice among them.

Publishing and sending are two steps. A state is published once for all servers that are updated at the same time. The
HTTP transport cannot publish for several servers: it sends the state to each.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from threading import Lock
from typing import Protocol

import torch

from sparring.errors import WeightsError, refusal
from sparring.types import WeightRef
from sparring.weights.inline import reference
from sparring.weights.upload import Bucket

PROBED = "link-probe"
"""Name that stands for the model in the `WeightRef` of a small random tensor, which a server fetches as a test."""


class LinkServer(Protocol):
    """Calls of an engine's server that a link needs. They block, and raise EngineError if the server does not
    answer."""

    def sees(self, ref: WeightRef) -> None:
        """Make the server fetch published tensors and drop them again; raise WeightsError if it cannot."""
        ...

    def take(self, bucket: Bucket, data: Sequence[memoryview]) -> None:
        """Send a part of an upload; `data` has its bytes in pieces. Raises WeightsError if the server refuses the
        part."""
        ...


class Link(Protocol):
    """Transport of weights to servers. Its methods block, and may be called from several threads.

    Attributes:
        transport: `WeightRef.transport` of the references that the server fetches.
        about: description for the user.
        setting: configuration key by which the user chose this link, "" for none. With a key, a server that cannot use
            the link is refused.
    """

    transport: str
    about: str
    setting: str | None

    def published(self, ref: WeightRef) -> AbstractContextManager[WeightRef]:
        """Publish the tensors of an inline reference for all servers until the context ends; raise WeightsError if
        there is no room for them."""
        ...

    def send(self, ref: WeightRef, server: LinkServer) -> WeightRef:
        """Send published weights to one server, if the server cannot fetch them by itself. Return the reference that
        this server fetches."""
        ...

    def close(self) -> None:
        """Remove everything that is still published."""
        ...


@dataclass(slots=True)
class _Shared:
    """Published weights with the number of their users."""

    ref: WeightRef
    stack: ExitStack
    users: int = 0


class WeightLinks:
    """Links of a run, which all its servers share, in the order of preference."""

    def __init__(self, links: Sequence[Link]) -> None:
        self._links = links
        self._shared: dict[tuple[str, ...], _Shared] = {}
        self._lock = Lock()  # also held while a state is written, for which those who want the same state wait

    def choose(self, server: LinkServer, where: str) -> Link:
        """Return the first link over which a server can fetch a random tensor. Raises BadInput if the server cannot use
        a link of the user's settings, and WeightsError if it can use no link."""
        problem = WeightsError(f"{where}: expected a link, got none")
        probe = torch.frombuffer(bytearray(secrets.token_bytes(64)), dtype=torch.uint8)
        for link in self._links:
            try:
                with link.published(reference(PROBED, 0, {"probe": probe})) as ref:
                    server.sees(link.send(ref, server))
                return link
            except WeightsError as error:
                problem = error
                if link.setting is not None:
                    expected = f"a folder in which this machine writes and the {where} reads"
                    raise refusal(link.setting, expected, str(error), "name another folder, or leave it out") from error
        raise problem

    @contextmanager
    def published(self, link: Link, ref: WeightRef) -> Iterator[WeightRef]:
        """Publish the tensors of an inline reference over a link until the context ends. Callers that publish equal
        tensors at the same time share one publication. Each caller gets a reference with its own version and probe."""
        key = (link.transport, ref.model, ref.adapter or "", ref.checksum)
        with self._lock:
            shared = self._shared.get(key)
            if shared is None:
                stack = ExitStack()
                shared = self._shared[key] = _Shared(stack.enter_context(link.published(ref)), stack)
            shared.users += 1
        try:
            yield replace(ref, transport=shared.ref.transport, location=shared.ref.location)
        finally:
            with self._lock:
                shared.users -= 1
                if not shared.users:
                    del self._shared[key]
                    shared.stack.close()

    def close(self) -> None:
        """Remove everything that is still published."""
        for link in self._links:
            link.close()
