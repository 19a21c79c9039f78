"""Spans of the wall clock: shares of time per activity, with overlap, and what a part that is idle waits for."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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
        self._seconds: defaultdict[frozenset[str], float] = defaultdict(float)
        self._since = clock()

    def enter(self, name: str) -> None:
        """Take note that activity `name` begins."""
        if name not in self._active:  # only then does what goes on change
            self._turn()
        self._active[name] += 1

    def leave(self, name: str) -> None:
        """Take note that activity `name`, entered before, ends."""
        if self._active[name] == 1:
            self._turn()
            del self._active[name]
        else:
            self._active[name] -= 1

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Do the body as activity `name`."""
        self.enter(name)
        try:
            yield
        finally:
            self.leave(name)

    def lap(self) -> dict[frozenset[str], float]:
        """Return the seconds since the last call by the activities that went on together, and start over."""
        self._turn()
        seconds: dict[frozenset[str], float] = dict(self._seconds)
        self._seconds.clear()
        return seconds

    def shares(self) -> dict[str, float]:
        """Return `shares` of the time since the last call, and start over."""
        return shares(self.lap())

    def _turn(self) -> None:
        now = self._clock()
        if now > self._since:
            self._seconds[frozenset(self._active)] += now - self._since
        self._since = now


def shares(seconds: Mapping[frozenset[str], float], of: Collection[str] | None = None) -> dict[str, float]:
    """Return the shares of time of activities.

    `<name>` is the share in which it went on, `overlap` in which two or more did, `waiting` in which none did. Overlap
    is counted in each of its activities, so `sum of activities - overlap + waiting = 1` for two of them.

    Args:
        seconds: by the activities that went on together, of `Spans.lap`.
        of: the activities that count; None for all.
    """
    total = sum(seconds.values())
    made = {"waiting": 0.0, "overlap": 0.0}
    for together, lasted in seconds.items() if total > 0 else ():
        names = together if of is None else together.intersection(of)
        kind = "waiting" if not names else "overlap" if len(names) > 1 else None
        for name in (*names, *([kind] if kind else [])):
            made[name] = made.get(name, 0.0) + lasted / total
    return made


def shares_by_cause(
    seconds: Mapping[frozenset[str], float], busy: Collection[str], causes: Sequence[tuple[str, str]]
) -> dict[str, float]:
    """Return the share of time in which a part was `busy`, and the shares in which it was idle, by cause: they add up
    to 1.

    Args:
        seconds: by the activities that went on together, of `Spans.lap`.
        busy: the activities of the part itself.
        causes: activities of others and what they are called as a cause; of several that go on at once the first one
            is the cause, and `other` is where none does.
    """
    total = sum(seconds.values())
    made = dict.fromkeys(("busy", *(cause for _, cause in causes), "other"), 0.0)
    for together, lasted in seconds.items() if total > 0 else ():
        idle = next((cause for name, cause in causes if name in together), "other")
        made["busy" if together.intersection(busy) else idle] += lasted / total
    return made
