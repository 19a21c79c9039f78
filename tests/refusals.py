"""Assertion of a refusal by its place and one noun, whatever the sentence around them; what a command says on a slow
machine, too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from sparring.errors import BadInput


@contextmanager
def refused_at(where: str, noun: str) -> Iterator[None]:
    """Expect the body to be refused.

    Args:
        where: place of the refusal in full, `BadInput.where`.
        noun: words of its message behind the place that tell it from other refusals at that place.
    """
    with pytest.raises(BadInput) as refusal:
        yield
    message = str(refusal.value)
    assert refusal.value.where == where, message
    assert noun in message.partition(f"{where}: ")[2], message


def without_waits(error: str) -> str:
    """Return what a command wrote to standard error, without the lines that a loaded machine adds: what it waits for."""
    return "".join(line for line in error.splitlines(keepends=True) if not line.startswith("waiting for "))
