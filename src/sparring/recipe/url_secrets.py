"""Detection of users and passwords in URLs, which a recipe must not have: it is copied into the run's folder and quoted
in messages.

A key belongs in an environment variable, named by `api_key_env`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from sparring.errors import BadInput, refusal
from sparring.validation import Key

ADDRESSES = ("url", "urls", "gateway", "listen")
"""Keys whose values are addresses. These may contain credentials even without a scheme: `user:password@host`."""

_URL = re.compile(r"\s*(?:[a-z][a-z0-9+.-]*:)?//[^/?#\s]*@\S*\s*", re.IGNORECASE)
_ADDRESS = re.compile(r"\s*(?!unix:)[^/?#\s]*@")
_IN_TEXT = re.compile(r"""(//|=)[^/?#\s"']*@""")


def has_user(text: str, key: Key = "") -> bool:
    """Return whether a text, the value of `key` in a recipe or of an option, is a URL with a user, with or without a
    password."""
    return _URL.fullmatch(text) is not None or key in ADDRESSES and _ADDRESS.match(text) is not None


def masked(text: str) -> str:
    """Return a text for the user, such as `--set engine.urls=http://user:password@host`, with the users of its URLs
    replaced."""
    return _IN_TEXT.sub(r"\1...@", text)


def found(data: Any, keys: tuple[Key, ...] = ()) -> Iterator[tuple[tuple[Key, ...], str]]:
    """Yield (keys from the outermost table, URL) for each URL with a user in `data`, a part of a recipe below
    `keys`."""
    if isinstance(data, str):
        if has_user(data, next((key for key in reversed(keys) if isinstance(key, str)), "")):
            yield keys, data
    elif isinstance(data, Mapping):
        for key, value in data.items():
            yield from found(value, (*keys, key))
    elif isinstance(data, (list, tuple)):
        for number, value in enumerate(data):
            yield from found(value, (*keys, number))


def refused(where: str, key: Key) -> BadInput:
    """Return the error for a URL with a user as the value of `key` in `where`; the message does not quote the URL."""
    advice = "leave them out, and let the code read them from an environment variable"
    if key in ("url", "urls") and not where.endswith("rollout.gateway.url"):
        advice = (
            "leave them out, and name the environment variable that has the key in api_key_env; for a server that "
            "takes a user and a password, its value is `Basic ` and the base64 of user:password"
        )
    expected = "an address without a user and a password, which would be written into config.toml and into messages"
    return refusal(where, expected, "one with them", advice)
