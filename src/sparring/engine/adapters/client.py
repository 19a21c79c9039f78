"""Common parts of the clients of engines on other servers: API keys and counts of answers. Torch-free."""

from __future__ import annotations

import os
from collections import defaultdict

from sparring.errors import refusal
from sparring.generation import Completion

LATER = frozenset((408, 409, 429))
"""HTTP statuses below 500 that refuse a request only temporarily."""


def is_refusal(status: int) -> bool:
    """Return whether an HTTP status means that this request will never be served."""
    return 400 <= status < 500 and status not in LATER


class ClientCounts:
    """Counts of a client since its start.

    Attributes:
        values: counts by name: completions, generated_tokens, cached_tokens, updates.
    """

    def __init__(self) -> None:
        self.values: dict[str, float] = defaultdict(float)

    def completed(self, completion: Completion) -> Completion:
        """Count a completion and return it."""
        self.values["completions"] += 1
        self.values["generated_tokens"] += len(completion.tokens)
        self.values["cached_tokens"] += completion.cached_tokens
        return completion

    def updated(self) -> None:
        """Count an update of the weights that the server acknowledged."""
        self.values["updates"] += 1


def read_api_key(variable: str) -> str:
    """Read a server's API key from an environment variable: keys are never written in a recipe or on a command line.

    Args:
        variable: name of the variable; "" for a server without a key.

    Returns:
        The key; "" without a variable.

    Raises:
        BadInput: the variable is not set, is empty, or has characters outside ASCII.
    """
    key = os.environ.get(variable, "") if variable else ""
    if variable and not key:
        raise refusal(f"environment variable {variable}", "an API key", "nothing", "set it")
    if not key.isascii():
        raise refusal(f"environment variable {variable}", "an API key in ASCII", "other characters", "correct it")
    return key


def authorization(api_key: str) -> dict[str, str]:
    """Return the headers with a server's key: as a bearer token, or as is if the key is a user and a password
    (`Basic dXNlcjpwYXNzd29yZA==`).

    Args:
        api_key: key from `read_api_key`.
    """
    if not api_key:
        return {}
    return {"authorization": api_key if api_key.startswith("Basic ") else f"Bearer {api_key}"}
