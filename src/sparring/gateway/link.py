"""Words between the process of a run and `sparring gateway`: JSON over HTTP on a socket in the run's folder."""

from __future__ import annotations

import asyncio
from enum import StrEnum, auto
from typing import Any, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from sparring.errors import BadInput, InfraError, LimitReached, PolicyFailure, RequestRefused, SparringError
from sparring.gateway.dialects.dialect import ClientRequest
from sparring.gateway.exchange import DoorExchanges
from sparring.gateway.keys import WrongKey
from sparring.gateway.models import ModelTable, UnknownModel
from sparring.gateway.reading import Room
from sparring.reply import ReplyHead, SampledReply
from sparring.types import ReplyPiece

SOCKET = "gateway.sock"
"""Name of the socket in a run's folder."""


class AnsweredDoor(Protocol):
    """Door as the endpoints see it, here or in the process of a run: see the attributes of `server.Door`."""

    @property
    def models(self) -> ModelTable[Any]:
        """The models that its client may name."""

    @property
    def leave_out(self) -> frozenset[str]:
        """Types of tools that are left out."""

    @property
    def exchanges(self) -> DoorExchanges:
        """The exchanges of its client's requests."""

    @property
    def room(self) -> Room:
        """Room that a prompt has."""

    @property
    def reading(self) -> asyncio.Lock:
        """Held while a request is read."""

    @property
    def ping_s(self) -> float:
        """Seconds between signs of life."""


class RunLink(Protocol):
    """Link to the process of a run, for a gateway in a process of its own."""

    async def door(self, key: str) -> AnsweredDoor:
        """Return the door of a key. Raises WrongKey where there is none, InfraError where the run does not answer."""

    async def forward(self, request: Request) -> Response:
        """Return the answer of the run's process to a request. Raises InfraError where it does not answer."""

    async def forward_to_tools(self, request: Request) -> Response:
        """Return the answer to a request to a world's tools; see `forward`. The run's process hears whether the client
        got it."""


class KeyForm(msgspec.Struct, frozen=True, kw_only=True):
    """Key of a door that is to be described."""

    key: str


class DoorForm(msgspec.Struct, frozen=True, kw_only=True):
    """Door of a key: the names of its models beside the policy's, each with the entry that answers to it or None, the
    types of tools that it leaves out, the room of a prompt, and the seconds between signs of life."""

    room: Room
    models: dict[str, str | None]
    leave_out: tuple[str, ...]
    ping_s: float


class ExchangeForm(msgspec.Struct, frozen=True, kw_only=True):
    """Request of a client that is to be answered, or to be the exchange that it repeats.

    Attributes:
        reader: name of the connection that reads the answer, chosen by the gateway.
        gateway: name of the gateway's process.
        key: of the door.
        digest: of what is asked, in hexadecimal digits.
        retried: whether the request says that it was sent before.
        wanted: what is asked; what the writer of the answer needs beside it stays in the gateway.
    """

    reader: str
    gateway: str
    key: str
    digest: str
    retried: bool
    wanted: ClientRequest


class CountForm(msgspec.Struct, frozen=True, kw_only=True):
    """Request for the number of ids of a conversation."""

    key: str
    wanted: ClientRequest


class ErrorForm(msgspec.Struct, frozen=True, kw_only=True):
    """Error of a session: its class, as far as a client is told of it, its text, and of a limit which."""

    kind: str
    message: str
    reason: str = ""
    too_long: tuple[int, int] | None = None


class OverflowForm(msgspec.Struct, frozen=True, kw_only=True):
    """Note of a request that was refused unread, since its prompt is too long by far."""

    key: str
    error: ErrorForm


class HearForm(msgspec.Struct, frozen=True, kw_only=True):
    """Conversation that is told without asking for a reply."""

    key: str
    wanted: ClientRequest


class RefusedForm(msgspec.Struct, frozen=True, kw_only=True):
    """Note that a request of a door's client was refused in the gateway, and why; `misdirected` as in
    `DoorExchanges.refuse`."""

    key: str
    reason: str
    misdirected: bool = False


class RecallForm(msgspec.Struct, frozen=True, kw_only=True):
    """Replies whose conversations are wanted."""

    key: str
    replies: tuple[str, ...]


class EndForm(msgspec.Struct, frozen=True, kw_only=True):
    """Note that a connection no longer reads its exchange, and whether it got it to its end: None where nobody knows,
    also behind a note that it did."""

    reader: str
    delivered: bool | None


class BeginForm(msgspec.Struct, frozen=True, kw_only=True):
    """Name of a gateway's process that begins; connections of the one before it are broken. The answer is open for as
    long as the gateway is the run's, a `Word` a line."""

    gateway: str


class Word(StrEnum):
    """Line of the answer to `BeginForm`."""

    BEGUN = auto()
    """The gateway is the run's."""

    FOLLOWED = auto()
    """Another one is, from now on."""

    OVER = auto()
    """The run is over: no process goes on with it."""


class Line(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Line of an answer: a part of it, with the number of its sample, or the error in its place. `spelled` has the
    bytes of the ids of a reply, where the client wants log-probabilities. The last one is `over`."""

    sample: int = 0
    head: ReplyHead | None = None
    piece: ReplyPiece | None = None
    reply: SampledReply | None = None
    spelled: dict[int, bytes] | None = None
    error: ErrorForm | None = None
    over: bool = False


KINDS: dict[str, type[SparringError]] = {
    "wrong_key": WrongKey,
    "unknown_model": UnknownModel,
    "bad_input": BadInput,
    "policy": PolicyFailure,
    "refused": RequestRefused,
    "infra": InfraError,
}
"""Classes of errors that clients are told apart, each before those that it is one of."""


def error_form(error: SparringError) -> ErrorForm:
    """Write an error."""
    if isinstance(error, LimitReached):
        return ErrorForm(kind="limit", message=str(error), reason=error.reason, too_long=error.too_long)
    kind = next((name for name, kind in KINDS.items() if isinstance(error, kind)), "infra")
    return ErrorForm(kind=kind, message=str(error))


def raised(form: ErrorForm) -> SparringError:
    """Return the error that was written."""
    if form.kind == "limit":
        return LimitReached(form.reason, form.message, form.too_long)
    return KINDS.get(form.kind, InfraError)(form.message)


def encode(form: Any) -> bytes:
    """Write a form as JSON."""
    return msgspec.json.encode(form, enc_hook=_limit_values)


def decode(data: bytes, kind: Any) -> Any:
    """Read a form."""
    return msgspec.json.decode(data, type=kind, dec_hook=_limit)


def _limit_values(value: Any) -> tuple[str, str, tuple[int, int] | None]:
    if isinstance(value, LimitReached):
        return value.reason, str(value), value.too_long
    raise NotImplementedError(type(value).__name__)


def _limit(kind: type, values: Any) -> LimitReached:
    reason, message, too_long = values
    return LimitReached(reason, message, too_long and tuple(too_long))
