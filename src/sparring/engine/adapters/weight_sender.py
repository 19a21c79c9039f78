"""`WeightSender`: blocking requests to a server that take part in an update of its weights, within one time limit."""

from __future__ import annotations

import http.client
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec

from sparring.engine import wire
from sparring.errors import EngineError, WeightsError, boundary
from sparring.types import WeightRef
from sparring.weights.upload import Bucket

GRACE_S = 2.0
"""Seconds by which this side waits longer than `engine.update.timeout_s`, so that the server can refuse a late update
first."""


CONNECT_S = 10.0
"""Seconds that a connection may take to open."""

MOST_ANSWER = 1 << 20
"""Maximum number of bytes of an answer, which says little."""


class SentAnswer(NamedTuple):
    """Answer of a server; names of headers in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes


class _UnixConnection(http.client.HTTPConnection):
    """Connection to a socket in the file system."""

    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("engine", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class WeightSender:
    """Sender of weights to one server. Implements `LinkServer`.

    Args:
        url: `http://host:port`, or `unix:path` for a socket.
        timeout_s: `engine.update.timeout_s`. All requests together have `GRACE_S` more; a later answer is a
            WeightsError.
    """

    def __init__(self, url: str, headers: Mapping[str, str], timeout_s: float) -> None:
        self._url, self._headers, self._timeout_s = url, headers, timeout_s
        self._deadline = time.monotonic() + timeout_s + GRACE_S
        self._connection: http.client.HTTPConnection | None = None

    def sees(self, ref: WeightRef) -> None:
        self.post("sees", wire.encode(ref))

    def take(self, bucket: Bucket, data: Sequence[memoryview]) -> None:
        self._read("bucket", self._asked("bucket", data, {wire.BUCKET: wire.encode(bucket).decode()}))

    def post(self, name: str, body: bytes) -> SentAnswer:
        """Send JSON to an endpoint.

        Raises:
            WeightsError: the server refuses the weights, or did not answer in time.
            EngineError: the server is not there, or an error of its own.
        """
        return self._read(name, self._asked(name, [memoryview(body)], {}))

    def ask(self, name: str, body: bytes) -> SentAnswer:
        """Send JSON to an endpoint; return its answer, which may be an error.

        Raises:
            WeightsError: the server did not answer in time.
            EngineError: the server is not there.
        """
        return self._asked(name, [memoryview(body)], {})

    def cancel(self) -> None:
        """End the request that another thread waits for, if any, and all later ones, with an error."""
        self._deadline, connection = 0.0, self._connection
        if connection is not None:
            with suppress(OSError, AttributeError):  # closed meanwhile
                connection.sock.shutdown(socket.SHUT_RDWR)

    def _read(self, name: str, answer: SentAnswer) -> SentAnswer:
        """Raise the error that an answer holds, if any."""
        if answer.status != 200:
            where = f"engine at {self._url}: {name}"
            try:
                raise wire.raised(msgspec.json.decode(answer.body, type=wire.Failed).error, where)
            except msgspec.MsgspecError:
                raise EngineError(f"{where}: status {answer.status}: {answer.body[:200]!r}") from None
        return answer

    def _asked(self, name: str, body: Sequence[memoryview], headers: Mapping[str, str]) -> SentAnswer:
        with boundary(EngineError, f"engine at {self._url}: {name}"):
            connection = self._connection = _connection(self._url, min(self._left(), CONNECT_S))
            connection.connect()
            # a socket's own limit is for each of its reads, and an answer may come byte by byte
            timer = threading.Timer(self._left(), self.cancel)
            timer.daemon = True
            timer.start()
            try:
                length = {"content-length": str(sum(map(len, body)))}
                path = urlsplit(self._url).path.rstrip("/") if self._url.startswith("http") else ""
                timed = self._timed(connection, body)
                connection.request("POST", f"{path}/v1/{name}", timed, {**self._headers, **headers, **length})
                connection.sock.settimeout(self._left())
                with connection.getresponse() as response:
                    fields = {field.lower(): value for field, value in response.getheaders()}
                    answer = response.read(MOST_ANSWER + 1)
                if len(answer) > MOST_ANSWER:
                    raise ValueError(f"expected an answer of at most {MOST_ANSWER} bytes, got more")
                return SentAnswer(response.status, fields, answer)
            except (OSError, http.client.HTTPException) as error:
                if isinstance(error, TimeoutError) or time.monotonic() > self._deadline:
                    raise late(f"engine at {self._url}: weights", self._timeout_s) from None
                raise
            finally:
                timer.cancel()
                connection.close()

    def _timed(self, connection: http.client.HTTPConnection, body: Sequence[memoryview]) -> Iterator[memoryview]:
        for piece in body:
            connection.sock.settimeout(self._left())
            yield piece

    def _left(self) -> float:
        """Return the seconds that are left. Raises WeightsError if none are."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise late(f"engine at {self._url}: weights", self._timeout_s)
        return left


def late(where: str, timeout_s: float) -> WeightsError:
    """Return the error of an update that was not acknowledged in time."""
    expected = f"expected an acknowledgement within engine.update.timeout_s = {timeout_s:g}"
    return WeightsError(f"{where}: {expected}, got none; which version it serves is unknown until it answers again")


def _connection(url: str, timeout_s: float) -> http.client.HTTPConnection:
    if url.startswith("unix:"):
        return _UnixConnection(url.removeprefix("unix:"), timeout_s)
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    return kind(parts.hostname or "", parts.port, timeout=timeout_s)
