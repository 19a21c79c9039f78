"""The keys of servers, which stand in the environment and never in a recipe or on a command line."""

from __future__ import annotations

import os

from sparring.errors import refusal


def key_of(variable: str) -> str:
    """The key that an environment variable holds; "" where none is named.

    Raises:
        BadInput: there is no such variable, nothing in it, or no key.
    """
    key = os.environ.get(variable, "") if variable else ""
    if variable and not key:
        raise refusal(f"environment variable {variable}", "a key", "nothing", "set it")
    if not key.isascii():
        raise refusal(f"environment variable {variable}", "a key in ASCII", "other characters", "correct it")
    return key
