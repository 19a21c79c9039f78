"""Keys of rollouts: where a client may put one."""

from __future__ import annotations

from starlette.requests import Request

from sparring.errors import BadInput, refusal

PATH = "/k/{key}"
"""Beginning of a path for clients that cannot send a key."""


class WrongKey(BadInput):
    """A key opens no door."""


def key_of(request: Request) -> str:
    """Return the key of a request: `Authorization`, `x-api-key`, `x-goog-api-key`, `?key=` or the path.

    Raises:
        WrongKey: there is none, or there are two that are not the same.
    """
    bearer = request.headers.get("authorization", "")
    keys = {
        bearer[7:] if bearer.lower().startswith("bearer ") else bearer,
        request.headers.get("x-api-key", ""),
        request.headers.get("x-goog-api-key", ""),
        request.query_params.get("key", ""),
        request.path_params.get("key", ""),
    } - {""}
    if len(keys) != 1:
        raise wrong_key("several that differ" if keys else "none")
    return keys.pop()


def wrong_key(got: str) -> WrongKey:
    """Return the refusal of a key."""
    return WrongKey(str(refusal("API key", "the key of a rollout", got, "send the key that the harness got")))
