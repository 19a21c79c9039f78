"""Exchanges: a client's request and its answer. The answer is sampled once, even if the connection breaks and the
client sends the request again."""

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
from sparring.record.rendering import has_many, in_thread, renders_long
from sparring.reply import ReplyHead, ReplyPart, ReplyRequest, SampledReply, ShownReply, as_shown, pieces_of
from sparring.types import Message, ReplyPiece

RETAINED = 64
"""Maximum number of finished exchanges of a session that are kept, in case a client repeats its request."""

MOST_HEARD = 64
"""Maximum number of conversations of a session that are kept from requests that asked for no reply."""

_in_order = msgspec.msgpack.Encoder(order="deterministic")

HOW = frozenset(("stream", "stream_options"))
"""Fields of a request that change only the form of the answer."""

RETRIES = b"x-stainless-retry-count"
"""Header in which the vendors' clients count their retries of a request."""


class Exchange:
    """One request of a client, and its answer so far.

    Attributes:
        parts: parts of the answer so far, each with the number of its sample.
        replies: complete replies, by the number of their sample.
        error: error that ended the answer; None if there was no error.
        over: whether the answer is complete or failed.
        broken: whether a connection broke before the end of the answer, and no other connection delivered the answer.
        wakers: functions that wake the reading connections when a part arrives, one per connection.
    """

    def __init__(self, session: Session, client_request: ClientRequest) -> None:
        self.parts: list[tuple[int, ReplyPart]] = []
        self.replies: dict[int, SampledReply] = {}
        self.error: SparringError | None = None
        self.over = False
        self.broken = False
        self.wakers: set[Callable[[], None]] = set()
        self._session = session
        self._shown = [ShownReply() for _ in range(client_request.samples)]
        self._ids: dict[int, str] = {}
        self._delivered = False
        self._in_pieces = client_request.stream
        # only the task holds the request, so that a kept exchange does not hold the whole conversation
        self.sampling = asyncio.get_running_loop().create_task(self._sample(client_request))

    @property
    def refused(self) -> bool:
        """Whether the exchange ended by a wrong request or a limit of the rollout, and not by a fault of the engine."""
        return isinstance(self.error, (BadInput, PolicyFailure))

    @property
    def whole(self) -> list[SampledReply]:
        """Complete replies, in order. Raises the error of an exchange that failed."""
        if self.error is not None:
            raise self.error
        return [self.replies[sample] for sample in sorted(self.replies)]

    def deliver(self, delivered: bool | None) -> None:
        """Record whether a connection delivered the complete answer to its client; None: unknown.

        None also replaces an earlier True: the connection broke after the last byte. Then a repeated request joins this
        exchange, as after a broken connection; without a repeated request, the answer counts as delivered.
        """
        if self._in_pieces and self.over and not self.wakers:
            self._compact()
        if delivered is None or not self._delivered:
            self._delivered, self.broken = bool(delivered), not delivered
            for id in self._ids.values():
                self._session.deliver(id, delivered)

    async def end(self) -> None:
        """End the sampling; replies keep the tokens that they have."""
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
        if self.broken and not self.wakers:
            self._session.deliver(reply.id, False)
        self._add(sample, reply)

    def _show(self, sample: int, part: ReplyHead | ReplyPiece) -> None:
        if isinstance(part, ReplyHead):
            self._ids[sample] = part.id
        else:
            self._shown[sample].add(part)
            part = as_shown(part)
        self._add(sample, part)

    def _add(self, sample: int, part: ReplyPart) -> None:
        if isinstance(part, SampledReply):
            self.replies[sample] = part
        self.parts.append((sample, part))
        self._wake()

    def _wake(self) -> None:
        for wake in self.wakers:
            wake()

    def _compact(self) -> None:
        """Join the pieces of each reply, so that each part of its message is one piece, to save memory."""
        self._in_pieces = False
        if self.error is None:
            self.parts = []
            for sample, reply in self.replies.items():
                self.parts.append((sample, ReplyHead(id=reply.id, prompt_tokens=reply.prompt_tokens)))
                self.parts += [(sample, piece) for piece in pieces_of(reply.message)]
                self.parts.append((sample, reply))


class Exchanges:
    """Exchanges of one session's endpoint (`Door`): the running ones and the latest finished ones."""

    def __init__(self, models: ModelTable) -> None:
        self._models, self._session = models, models.sessions[0]
        self._all: OrderedDict[Exchange, bytes] = OrderedDict()
        self._of_request: dict[bytes, list[Exchange]] = {}
        self._heard: OrderedDict[str, tuple[Message, ...]] = OrderedDict()
        self._num_heard = 0
        self._refused = False

    def __len__(self) -> int:
        return len(self._all)

    @property
    def under_way(self) -> list[Exchange]:
        """Exchanges whose answers are not complete."""
        return [exchange for exchange in self._all if not exchange.over]

    @property
    def broken(self) -> list[Exchange]:
        """Exchanges whose connection broke and that have no reader."""
        return [exchange for exchange in self._all if exchange.broken and not exchange.wakers]

    def begin(self, request: bytes, *, retried: bool, wanted: ClientRequest) -> Exchange:
        """Return the exchange of a request: a new exchange, or the earlier exchange that the request repeats.

        Args:
            retried: whether the client marks the request as a retry.
        """
        exchange = self.of(request, retried=retried)
        if exchange is None:
            exchange = Exchange(self._models.session(wanted.model), wanted)
            self.add(request, exchange)
        return exchange

    async def count(self, wanted: ClientRequest) -> int:
        """Return the number of tokens of a conversation. Raises LimitReached if the conversation is far too long."""
        session = self._models.session(wanted.model)
        if renders_long(wanted.messages) or has_many(tool.parameters for tool in wanted.tools):
            return await in_thread(session.count, wanted.messages, wanted.tools)
        return session.count(wanted.messages, wanted.tools)

    def refuse(self, reason: str, *, misdirected: bool = False) -> None:
        """Record in the policy's session that a request of its client was refused before it reached the session.

        Args:
            misdirected: whether no endpoint has the path or method. Such a refusal counts only if the client made no
                other request, because agents also call paths that have nothing to do with replies.
        """
        if not misdirected or not self._all and not self._refused:
            self._session.refuse(reason)
        self._refused = self._refused or not misdirected

    def overflow(self, limit: LimitReached) -> None:
        """Record that a request was refused unread, because its prompt is far too long."""
        self._session.overflow(limit)

    def hear(self, wanted: ClientRequest) -> str:
        """Keep a conversation that a client sends without asking for a reply. Return the id by which a later request
        can continue this conversation."""
        self._num_heard += 1
        id = f"heard#{self._num_heard}"
        self._heard[id] = wanted.messages
        if len(self._heard) > MOST_HEARD:
            self._heard.popitem(last=False)
        return id

    def conversations(self, replies: Collection[str]) -> dict[str, tuple[Message, ...]]:
        """Return all messages up to each of the given replies, by reply id. Unknown replies are left out. An id from
        `hear` counts as a reply."""
        recalled = {reply: self._heard[reply] for reply in replies if reply in self._heard}
        for session in self._models.sessions:
            for reply in replies:
                messages = session.conversation(reply)
                if messages is not None:
                    recalled.setdefault(reply, messages)
        return recalled

    def of(self, request: bytes, *, retried: bool) -> Exchange | None:
        """Return the exchange that a request repeats, or None if the request is new.

        An equal request joins an exchange whose connection broke. A request that is marked as a retry joins the latest
        equal exchange. If that exchange failed, the request begins a new exchange, which is the same turn for the
        session.
        """
        equal = [exchange for exchange in self._of_request.get(request, ()) if not exchange.refused]
        for exchange in equal:
            if exchange.broken and not exchange.wakers and exchange.error is None:
                return exchange
        return equal[-1] if retried and equal and equal[-1].error is None else None

    def add(self, request: bytes, exchange: Exchange) -> None:
        """Keep a new exchange, and drop the oldest finished ones without readers above `RETAINED`."""
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
    """Return a digest that is equal for equal requests of one agent, streamed or not.

    The order of fields does not matter: codex changes the order when it repeats a request.
    """
    fields = {name: value for name, value in body.items() if name not in HOW}
    agent = client_request.evidence.agent
    try:
        data = _in_order.encode((path, agent, fields))
    except (OverflowError, ValueError):  # integers above 64 bits
        data = json.dumps([path, agent, fields], sort_keys=True).encode()
    return xxhash.xxh3_128_digest(data)


def is_retried(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Return whether the headers mark a request as a retry."""
    # int() refuses numbers of thousands of digits
    return any(name == RETRIES and count.isdigit() and count.strip(b"0") != b"" for name, count in headers)
