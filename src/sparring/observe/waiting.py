"""Waits for a user's code that blocks: what is waited for is said, and a limit ends it."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sparring.errors import refusal
from sparring.observe.terminal import say

SAID_AFTER_S = 10.0
"""Seconds after which a wait is said."""


def to_stderr(sentence: str) -> None:
    """Print a sentence to standard error."""
    say(sentence, stream=sys.stderr)


@contextmanager
def waiting(
    what: str, key: str = "", limit_s: float = 0, said: Callable[[str], None] = to_stderr, after_s: float = SAID_AFTER_S
) -> Iterator[None]:
    """Say what is waited for if the body takes longer than `after_s`, even if it blocks the event loop. `said` is
    called in another thread. In the main thread the setting `key`, `limit_s` seconds, bounds the body.

    Raises:
        BadInput: the limit was hit.
    """

    def strike(*of_signal: object) -> None:
        raise refusal(what, f"its end within {limit_s:g} s", "none", f"correct it, or raise {key}")

    bounds = f" ({key} = {limit_s:g} bounds it)" if key else ""
    timer = threading.Timer(after_s, said, [f"waiting for {what} since {after_s:g} s{bounds}"])
    timer.daemon = True
    timer.start()
    bounded = key and threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGALRM, strike) if bounded else None
    try:
        if bounded:
            signal.setitimer(signal.ITIMER_REAL, limit_s)
        yield
    finally:
        timer.cancel()
        if bounded:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
