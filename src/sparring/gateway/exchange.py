"""Exchanges: a client's request and its answer, which is sampled once, however often connections break."""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import aclosing
from typing import Any

import msgspec
import xxhash

from sparring.errors import BadInput, LimitReached, PolicyFailure, SparringError
from sparring.gateway.dialects.dialect import ClientRequest
from sparring.gateway.models import ModelTable
from sparring.protocols import Session
from sparring.record.rendering import apart, has_many, renders_long
from sparring.reply import ReplyHead, ReplyPart, ReplyRequest, SampledReply, ShownReply, as_shown, pieces_of
from sparring.types import Message, ReplyPiece

RETAINED = 64
"""Exchanges of one door that are there to be read again when nobody reads them."""

MOST_HEARD = 64
"""Conversations of one door that were told without asking for a reply, and that a later request may continue."""

_in_order = msgspec.msgpack.Encoder(order="deterministic")

HOW = frozenset(("stream", "stream_options"))
"""Fields of a request that say how it is answered, and not with what."""

RETRIES = b"x-stainless-retry-count"
"""Header in which the vendors' clients count how often they have sent a request before."""


class Exchange:
    """One request of a client, and its answer so far.

    Args:
        session: answers.
        client_request: what is asked.

    Attributes:
        parts: of the answer so far, each with the number of its sample.
        replies: that are whole, by the number of their sample.
        error: in the place of the rest of the answer.
        over: whether nothing is left to come.
        broken: whether a connection that read it broke before the answer's end, and no other got it to there.
        wakers: called when there is more; one for each connection that reads.
    """

    def __init__(self, session: Session, client_request: ClientRequest) -> None:
        self.parts: list[tuple[int, ReplyPart]] = []
        self.replies: dict[int, SampledReply] = {}
        self.error: SparringError | None = None
        self.over = False
        self.broken = False
        self.wakers: set[Callable[[], None]] = set()
        self._session, self._num_samples = session, client_request.samples
        self._shown = [ShownReply() for _ in range(client_request.samples)]
        self._ids: dict[int, str] = {}
        self._delivered = False
        self._in_pieces = client_request.stream
        # the request goes with this task: exchanges are remembered, and whole conversations need not be
        self.sampling = asyncio.get_running_loop().create_task(self._sample(client_request))

    @property
    def refused(self) -> bool:
        """True where the engine was not at fault: the request was wrong, or the rollout at its limit."""
        return isinstance(self.error, (BadInput, PolicyFailure))

    @property
    def whole(self) -> list[SampledReply]:
        """The replies, in order. Raises the error that stands in their place."""
        if self.error is not None:
            raise self.error
        return [self.replies[sample] for sample in range(self._num_samples)]

    def deliver(self, delivered: bool | None) -> None:
        """Take note of whether a connection that read the answer got it to its end. Where one did, it is delivered.
        Where nobody knows (None), also of one that was said to have, an equal request is this one, as one whose
        connection broke; where none comes, its client had the answer: who has not sends again."""
        if self._in_pieces and self.over and not self.wakers:
            self._compact()
        if delivered is None or not self._delivered:
            self._delivered, self.broken = bool(delivered), not delivered
            for id in self._ids.values():
                self._session.deliver(id, delivered)

    async def end(self) -> None:
        """End the sampling with what there is."""
        for sample, id in self._ids.items():
            if sample not in self.replies:
                await self._session.abort(id)
        if not self._ids:
            self.sampling.cancel()

    async def _sample(self, wanted: ClientRequest) -> None:
        try:
            if wanted.samples == 1:
                await self._reply(0, wanted)
            else:
                replies = (self._reply(sample, wanted) for sample in range(wanted.samples))
                for error in await asyncio.gather(*replies, return_exceptions=True):
                    if error is not None:
                        raise error
        except SparringError as error:
            self.error = error
        except asyncio.CancelledError:
            self.error = LimitReached("cancelled", "the rollout is over")
            raise
        finally:
            self.over = True
            self._wake()

    async def _reply(self, sample: int, wanted: ClientRequest) -> None:
        request = ReplyRequest(
            wanted.messages,
            wanted.tools,
            constraint=wanted.constraint,
            max_tokens=wanted.max_tokens,
            stop=wanted.stop,
            evidence=wanted.evidence,
            calls=wanted.calls,
            in_pieces=wanted.stream,
        )
        async with aclosing(self._session.reply(request)) as parts:
            async for part in parts:
                if isinstance(part, SampledReply):
                    reply = part
                else:
                    self._show(sample, part)
        if sample not in self._ids:
            self._show(sample, ReplyHead(id=reply.id, prompt_tokens=reply.prompt_tokens))
        for piece in self._shown[sample].rest(reply.message):
            self._show(sample, piece)
        self.replies[sample] = reply
        self.parts.append((sample, reply))
        if self.broken and not self.wakers:
            self._session.deliver(reply.id, False)
        self._wake()

    def _show(self, sample: int, part: ReplyHead | ReplyPiece) -> None:
        if isinstance(part, ReplyHead):
            self._ids[sample] = part.id
        else:
            self._shown[sample].add(part)
            part = as_shown(part)
        self.parts.append((sample, part))
        self._wake()

    def _wake(self) -> None:
        for wake in self.wakers:
            wake()

    def _compact(self) -> None:
        """Hold each reply in as few pieces as it has parts."""
        self._in_pieces = False
        if self.error is None:
            self.parts = [
                (sample, part)
                for sample, reply in self.replies.items()
                for part in (
                    ReplyHead(id=reply.id, prompt_tokens=reply.prompt_tokens),
                    *pieces_of(reply.message),
                    reply,
                )
            ]


class Exchanges:
    """The exchanges of one door: those under way, and the latest of those that are over.

    Args:
        session: of the policy.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._all: OrderedDict[Exchange, bytes] = OrderedDict()
        self._of_request: dict[bytes, list[Exchange]] = {}
        self._heard: OrderedDict[str, tuple[Message, ...]] = OrderedDict()
        self._num_heard = 0
        self._refused = False

    def __len__(self) -> int:
        return len(self._all)

    @property
    def under_way(self) -> list[Exchange]:
        """Those whose answers are not whole."""
        return [exchange for exchange in self._all if not exchange.over]

    @property
    def broken(self) -> list[Exchange]:
        """Those whose connection broke, and that nobody reads."""
        return [exchange for exchange in self._all if exchange.broken and not exchange.wakers]

    def begin(self, request: bytes, *, retried: bool, session: Session, wanted: ClientRequest) -> Exchange:
        """Return the exchange of a request: that of the one that it repeats, or a new one, which samples from now on.

        Args:
            request: digest of what is asked, and by whom.
            retried: whether it says that it was sent before.
            session: answers.
            wanted: what is asked.
        """
        exchange = self.of(request, retried=retried)
        if exchange is None:
            exchange = Exchange(session, wanted)
            self.add(request, exchange)
        return exchange

    async def count(self, session: Session, wanted: ClientRequest) -> int:
        """Return the number of ids of a conversation. Raises LimitReached where it is too long by far."""
        if renders_long(wanted.messages) or has_many(tool.parameters for tool in wanted.tools):
            return await apart(session.count, wanted.messages, wanted.tools)
        return session.count(wanted.messages, wanted.tools)

    async def refuse(self, session: Session, reason: str, *, misdirected: bool = False) -> None:
        """Have a session take note that a request of its client was refused before it came there. One for a path or by
        a method that no endpoint has counts where there was no other: agents ask for more than replies."""
        if not misdirected or not self._all and not self._refused:
            session.refuse(reason)
        self._refused = self._refused or not misdirected

    async def overflow(self, limit: LimitReached) -> None:
        """Take note of a request that was refused unread, since its prompt is too long by far."""
        self._session.overflow(limit)

    async def hear(self, wanted: ClientRequest) -> str:
        """Take note of a conversation that a client tells without asking for a reply. Return the id by which a later
        request may continue it."""
        self._num_heard += 1
        id = f"heard#{self._num_heard}"
        self._heard[id] = wanted.messages
        if len(self._heard) > MOST_HEARD:
            self._heard.popitem(last=False)
        return id

    async def conversations(
        self, models: ModelTable[Session], replies: Collection[str]
    ) -> dict[str, tuple[Message, ...]]:
        """Return all messages up to each of these replies, or up to where one would have stood, by their ids; those of
        no reply of any of the models are left out."""
        recalled = {reply: self._heard[reply] for reply in replies if reply in self._heard}
        for session in models.sessions:
            for reply in replies:
                messages = session.conversation(reply)
                if messages is not None:
                    recalled.setdefault(reply, messages)
        return recalled

    def of(self, request: bytes, *, retried: bool) -> Exchange | None:
        """Return the exchange that a request is a repetition of; None where it is a new one.

        A request that is equal to one whose connection broke is that one. One that says that it was sent before is the
        latest that is equal, unless that failed: then it is a new one, for the session the same turn.

        Args:
            request: digest of what is asked, and by whom.
            retried: whether it says that it was sent before.
        """
        equal = [exchange for exchange in self._of_request.get(request, ()) if not exchange.refused]
        for exchange in equal:
            if exchange.broken and not exchange.wakers and exchange.error is None:
                return exchange
        return equal[-1] if retried and equal and equal[-1].error is None else None

    def add(self, request: bytes, exchange: Exchange) -> None:
        """Take note of a new exchange; forget the oldest that nobody reads, where there are too many."""
        self._all[exchange] = request
        self._of_request.setdefault(request, []).append(exchange)
        if len(self._all) > RETAINED:
            idle = [old for old in self._all if old.over and not old.wakers]
            for old in idle[: len(self._all) - RETAINED]:
                self._forget(old)

    def _forget(self, exchange: Exchange) -> None:
        request = self._all.pop(exchange)
        equal = self._of_request[request]
        equal.remove(exchange)
        if not equal:
            del self._of_request[request]


def request_digest(path: str, body: Mapping[str, Any], client_request: ClientRequest) -> bytes:
    """Return a digest that is equal for requests that ask for the same, streamed or not, by one agent.

    The order of fields makes no difference: codex writes them in another one when it sends a request again.
    """
    fields = {name: value for name, value in body.items() if name not in HOW}
    agent = client_request.evidence.agent
    try:
        data = _in_order.encode((path, agent, fields))
    except (OverflowError, ValueError):  # integers of any size
        data = json.dumps([path, agent, fields], sort_keys=True).encode()
    return xxhash.xxh3_128_digest(data)


def is_retried(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Return whether a request with these headers says that it was sent before."""
    # a number of thousands of digits has no integer
    return any(name == RETRIES and count.isdigit() and count.strip(b"0") != b"" for name, count in headers)
