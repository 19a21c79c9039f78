"""Messages between the process of a run and `sparring gateway`: JSON over HTTP on a socket in the run's folder."""

from __future__ import annotations

from enum import StrEnum, auto
from typing import Any, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from sparring.errors import BadInput, InfraError, LimitReached, PolicyFailure, RequestRefused, SparringError
from sparring.gateway.dialects.dialect import ClientRequest
from sparring.gateway.keys import WrongKey
from sparring.gateway.models import UnknownModel
from sparring.gateway.reading import AnsweredDoor, Room
from sparring.reply import ReplyHead, SampledReply
from sparring.types import Message, ReplyPiece

SOCKET = "gateway.sock"
"""Name of the socket in a run's folder."""


class RunLink(Protocol):
    """Link from the gateway's process to the process of a run."""

    async def door(self, key: str) -> AnsweredDoor:
        """Return the door of a key.

        Raises:
            WrongKey: the key opens no door.
            InfraError: the run's process does not answer.
        """

    async def forward(self, request: Request) -> Response:
        """Pass a request on to the run's process and return its response.

        Raises:
            BadInput: the body is too large.
            ClientDisconnect: the client left.
            InfraError: the run's process does not answer.
        """

    async def forward_to_tools(self, request: Request) -> Response:
        """Pass a request to the tools of a world on, return the response, and report to the run's process whether the
        client received it. Raises as `forward` does.
        """


class KeyForm(msgspec.Struct, frozen=True, kw_only=True):
    """Request to look up a key."""

    key: str


class DoorForm(msgspec.Struct, frozen=True, kw_only=True):
    """Description of a door.

    Attributes:
        room: maximum size of a prompt.
        models: names of the models other than the policy, each with its alias target or None.
        leave_out: types of vendor-hosted tools that are dropped from requests.
        ping_s: interval of keep-alive events, in seconds.
    """

    room: Room
    models: dict[str, str | None]
    leave_out: tuple[str, ...]
    ping_s: float


class ExchangeForm(msgspec.Struct, frozen=True, kw_only=True):
    """Request to answer a client's request, or to join the exchange that it repeats.

    Attributes:
        reader: id of the connection that reads the answer, chosen by the gateway.
        gateway: id of the gateway's process.
        key: key of the door.
        digest: digest of the request, in hexadecimal digits.
        retried: whether the client marks the request as a retry.
        wanted: request to answer, without `echo`, which only the gateway's writer needs.
    """

    reader: str
    gateway: str
    key: str
    digest: str
    retried: bool
    wanted: ClientRequest


class CallForm(msgspec.Struct, frozen=True, kw_only=True):
    """Call of one of the `METHODS` of a door's exchanges.

    Attributes:
        key: key of the door.
        arguments: arguments of the method.
    """

    key: str
    arguments: msgspec.Raw


METHODS: dict[str, tuple[Any, Any]] = {
    "count": (tuple[ClientRequest], int),
    "refuse": (tuple[str, bool], None),
    "overflow": (tuple[LimitReached], None),
    "hear": (tuple[ClientRequest], str),
    "conversations": (tuple[tuple[str, ...]], dict[str, tuple[Message, ...]]),
}
"""Methods of `DoorExchanges` that the gateway calls in the run's process, with the types of arguments and result."""


class EndForm(msgspec.Struct, frozen=True, kw_only=True):
    """Report that a connection stopped reading.

    Attributes:
        reader: id of the connection.
        delivered: whether the client received the complete answer; None: unknown, which may also correct an earlier
            True.
    """

    reader: str
    delivered: bool | None


class BeginForm(msgspec.Struct, frozen=True, kw_only=True):
    """Start of a gateway's process. It breaks all connections of the previous gateway. The response is a stream with
    one `Word` per line, and stays open while the gateway serves the run.
    """

    gateway: str


class Word(StrEnum):
    """Line of the response to `BeginForm`."""

    BEGUN = auto()
    """The gateway now serves the run."""

    FOLLOWED = auto()
    """Another gateway replaced this one."""

    OVER = auto()
    """The run is over and will not be resumed by another process."""


class Line(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Line of a streamed answer: a part, or the error that ended it.

    Attributes:
        sample: number of the sample that the part belongs to.
        spelled: bytes of the reply's token ids, if the client wants log-probabilities.
        error: error that ended the answer.
        over: whether this is the last line.
    """

    sample: int = 0
    head: ReplyHead | None = None
    piece: ReplyPiece | None = None
    reply: SampledReply | None = None
    spelled: dict[int, bytes] | None = None
    error: SparringError | None = None
    over: bool = False


KINDS: dict[str, type[SparringError]] = {
    "wrong_key": WrongKey,
    "unknown_model": UnknownModel,
    "bad_input": BadInput,
    "policy": PolicyFailure,
    "refused": RequestRefused,
    "infra": InfraError,
}
"""Names of the error classes that clients can tell apart; subclasses stand before their base classes."""


def encode(form: Any) -> bytes:
    """Encode a form as JSON. An error becomes a list of its kind, its message, and reason and length of a limit."""
    return msgspec.json.encode(form, enc_hook=_error_values)


def decode(data: bytes | msgspec.Raw, kind: Any) -> Any:
    """Decode a form of a given type."""
    return msgspec.json.decode(data, type=kind, dec_hook=_error)


def _error_values(value: Any) -> tuple[str, str, str, tuple[int, int] | None]:
    if isinstance(value, LimitReached):
        return "limit", str(value), value.reason, value.too_long
    if isinstance(value, SparringError):
        return next((name for name, kind in KINDS.items() if isinstance(value, kind)), "infra"), str(value), "", None
    raise NotImplementedError(type(value).__name__)


def _error(expected: type, values: Any) -> SparringError:
    kind, message, reason, too_long = values
    if kind == "limit":
        return LimitReached(reason, message, too_long and tuple(too_long))
    if expected is LimitReached:
        raise ValueError(f"expected a limit, got {kind}")
    return KINDS.get(kind, InfraError)(message)
