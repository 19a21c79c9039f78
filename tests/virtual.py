"""Tests that are coroutines, on a virtual clock or on a common event loop."""

from __future__ import annotations

import asyncio
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


def on_event_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Make a test of a coroutine, which runs on an event loop of its own for at most a minute."""

    @functools.wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*arguments, **named), 60))

    return run
