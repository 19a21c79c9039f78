"""Reports of long waits outside of a run's rollouts, on standard error, even while a user's code blocks the event loop.
The rollouts of a run, of which many wait at once, have `rollout.stalls`."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sparring.observe.terminal import say

SAID_AFTER_S = 10.0
"""Seconds after which a wait is told; told again, it has taken twice as long."""

_WAITS = list[tuple[str, Callable[[], str], float]]()
"""Waits under way, each with its detail and its begin. The last is usually a part of those before it."""


@contextmanager
def waiting(what: str, detail: Callable[[], str] = str) -> Iterator[None]:
    """Wait for `what` while the context is open; `detail` is called in another thread for the part waited for now."""
    wait = (what, detail, time.monotonic())
    _WAITS.append(wait)
    try:
        yield
    finally:
        _WAITS.remove(wait)


def awaited() -> str:
    """Return what is waited for now; empty if nothing is."""
    return "".join(f"{what} {detail()}".rstrip() for what, detail, _ in _WAITS[-1:])


@contextmanager
def telling_waits(
    tell: Callable[[str], None] = lambda sentence: say(sentence, stream=sys.stderr), after_s: float = SAID_AFTER_S
) -> Iterator[None]:
    """Report waits while the context is open, from a thread: each after `after_s` seconds without a report, and again
    after twice as many each time."""
    ended = threading.Event()

    def watch() -> None:
        told, told_at, gap_s = "", -math.inf, after_s
        while not ended.wait(after_s / 10):
            waits, now = _WAITS[:], time.monotonic()
            if not waits:
                continue
            (whole, _, begun), (what, detail, since) = waits[0], waits[-1]
            due_s = 2 * gap_s if what == told else after_s
            if now >= max(begun, told_at) + due_s:
                told, told_at, gap_s = what, now, due_s
                text = f"waiting for {what} {detail()}".rstrip() + f" since {now - since:.0f} s"
                tell(text if len(waits) == 1 else f"{text} ({whole}: {now - begun:.0f} s)")

    threading.Thread(target=watch, name="waits", daemon=True).start()
    try:
        yield
    finally:
        ended.set()
