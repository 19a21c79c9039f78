"""Spans of the wall clock: shares of time per activity, with overlap."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Spans:
    """Counts time per set of activities going on at once. All calls from one thread.

    An activity may be entered many times at once (128 rollouts in flight are one `generating`).

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._active: Counter[str] = Counter()
        self._seconds: Counter[frozenset[str]] = Counter()
        self._since = clock()

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Do the body as activity `name`."""
        if name not in self._active:  # only then does what goes on change
            self._turn()
        self._active[name] += 1
        try:
            yield
        finally:
            if self._active[name] == 1:
                self._turn()
                del self._active[name]
            else:
                self._active[name] -= 1

    def shares(self) -> dict[str, float]:
        """Return shares of the time since the last call, and start over.

        `<name>` is the share in which it went on, `overlap` in which two or more did, `waiting` in which none did.
        Overlap is counted in each of its activities, so `sum of activities - overlap + waiting = 1` for two of them.
        """
        self._turn()
        total = sum(self._seconds.values())
        shares = {"waiting": 0.0, "overlap": 0.0}
        if total > 0:
            for names, seconds in self._seconds.items():
                kind = "waiting" if not names else "overlap" if len(names) > 1 else None
                for name in (*names, *([kind] if kind else [])):
                    shares[name] = shares.get(name, 0.0) + seconds / total
        self._seconds.clear()
        return shares

    def _turn(self) -> None:
        now = self._clock()
        if now > self._since:
            self._seconds[frozenset(self._active)] += now - self._since
        self._since = now
