"""Keys of rollouts: where a client may put one."""

from __future__ import annotations

import hashlib
import secrets
from typing import Generic, TypeVar

from starlette.requests import Request

from sparring.errors import BadInput, refusal

PATH = "/k/{key}"
"""Beginning of a path for clients that cannot send a key."""

HEADERS = frozenset((b"authorization", b"x-api-key", b"x-goog-api-key"))
"""Headers in which clients send a key."""

V = TypeVar("V")
_SALT = secrets.token_bytes(32)


class WrongKey(BadInput):
    """A key opens no door."""


def key_of(request: Request) -> str:
    """Return the key of a request: `Authorization`, `x-api-key`, `x-goog-api-key`, `?key=` or the path.

    Raises:
        WrongKey: there is none, or there are two that are not the same.
    """
    shown = {name: value.decode("latin-1") for name, value in reversed(request.scope["headers"]) if name in HEADERS}
    bearer = shown.pop(b"authorization", "")
    keys: set[str] = {
        bearer[7:] if bearer[:7].lower() == "bearer " else bearer,
        *shown.values(),
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
    """Values by their keys, which are held as digests under a secret of the process: how long a look-up takes says
    nothing of how much of a key was right."""

    def __init__(self) -> None:
        self._values: dict[bytes, V] = {}

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: str) -> bool:
        return _sealed(key) in self._values

    def __setitem__(self, key: str, value: V) -> None:
        self._values[_sealed(key)] = value

    def get(self, key: str) -> V | None:
        """Return the value of a key; None where there is none."""
        return self._values.get(_sealed(key))

    def pop(self, key: str) -> V | None:
        """Take out the value of a key, and return it; None where there is none."""
        return self._values.pop(_sealed(key), None)

    def pop_oldest(self) -> V:
        """Take out the value that has been there longest, and return it."""
        return self._values.pop(next(iter(self._values)))


def _sealed(key: str) -> bytes:
    return hashlib.blake2b(key.encode("utf-8", "surrogateescape"), key=_SALT, digest_size=16).digest()
