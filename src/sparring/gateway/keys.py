"""API keys of rollouts: the places of a key in a request, and tables keyed by API keys."""

from __future__ import annotations

import hashlib
import secrets
from typing import Generic, TypeVar

from starlette.requests import Request

from sparring.errors import BadInput, refusal

PATH = "/k/{key}"
"""Path prefix for clients that cannot send a key in a header."""

HEADERS = frozenset((b"authorization", b"x-api-key", b"x-goog-api-key"))
"""Headers in which clients send a key."""

V = TypeVar("V")
_SALT = secrets.token_bytes(32)


class WrongKey(BadInput):
    """Error of a missing, ambiguous or wrong key."""


def key_of(request: Request) -> str:
    """Return the key of a request: `Authorization`, `x-api-key`, `x-goog-api-key`, `?key=` or the path.

    Raises:
        WrongKey: the request has no key, or two different keys.
    """
    headers = {name: value.decode("latin-1") for name, value in reversed(request.scope["headers"]) if name in HEADERS}
    bearer = headers.pop(b"authorization", "")
    keys: set[str] = {
        bearer[7:] if bearer[:7].lower() == "bearer " else bearer,
        *headers.values(),
        request.query_params.get("key", "") if request.scope["query_string"] else "",
        request.path_params.get("key", ""),
    } - {""}
    if len(keys) != 1:
        raise wrong_key("several that differ" if keys else "none")
    return keys.pop()


def wrong_key(got: str) -> WrongKey:
    """Return the refusal of a key."""
    return WrongKey(str(refusal("API key", "the key of a rollout", got, "send the key that the harness got")))


class KeyTable(Generic[V]):
    """Table of values by key. Digests with a secret of the process are stored instead of keys, so that the time of a
    look-up reveals nothing about a key."""

    def __init__(self) -> None:
        self._values: dict[bytes, V] = {}

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: str) -> bool:
        return _digest(key) in self._values

    def __setitem__(self, key: str, value: V) -> None:
        self._values[_digest(key)] = value

    def get(self, key: str) -> V | None:
        """Return the value of a key, or None if the key is unknown."""
        return self._values.get(_digest(key))

    def pop(self, key: str) -> V | None:
        """Remove and return the value of a key; None if the key is unknown."""
        return self._values.pop(_digest(key), None)

    def pop_oldest(self) -> V:
        """Remove and return the value that was inserted first."""
        return self._values.pop(next(iter(self._values)))


def _digest(key: str) -> bytes:
    return hashlib.blake2b(key.encode("utf-8", "surrogateescape"), key=_SALT, digest_size=16).digest()
