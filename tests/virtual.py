"""Tests whose time is that of a virtual clock."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import Any

from sparring.testing.clock import run_virtual


def on_virtual_clock(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Make a test of a coroutine, which runs on a virtual clock."""

    @functools.wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        run_virtual(test(*arguments, **named))

    return run
