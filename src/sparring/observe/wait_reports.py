"""Reports of long waits outside of a run's rollouts, on standard error, even while a user's code blocks the event loop.
Waits of rollouts, often many at once, are reported by `rollout.stalls`."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sparring.observe.terminal import say

SAID_AFTER_S = 10.0
"""Seconds after which a wait is reported; the interval to each further report doubles."""

_WAITS = list[tuple[str, Callable[[], str], float]]()
"""Current waits: name, function for the detail, start time. The last is usually a part of the waits before it."""


@contextmanager
def waiting(what: str, detail: Callable[[], str] = str) -> Iterator[None]:
    """Report a wait for `what` while the context is open; another thread calls `detail` of the latest wait."""
    wait = (what, detail, time.monotonic())
    _WAITS.append(wait)
    try:
        yield
    finally:
        _WAITS.remove(wait)


def awaited() -> str:
    """Return the latest current wait in words; empty if there is no wait."""
    return "".join(f"{what} {detail()}".rstrip() for what, detail, _ in _WAITS[-1:])


@contextmanager
def telling_waits(
    tell: Callable[[str], None] = lambda sentence: say(sentence, stream=sys.stderr), after_s: float = SAID_AFTER_S
) -> Iterator[None]:
    """Report waits while the context is open, from a thread: each after `after_s` seconds, and again after intervals
    that double each time."""
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
