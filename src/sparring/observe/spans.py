"""Spans of wall-clock time: shares by activity, with overlap, and the causes of idle time."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager


class Spans:
    """Account of time by the set of concurrent activities, on a monotonic clock. All calls come from one thread.

    An activity may be entered many times at once: 128 rollouts in flight are one `generating`.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._active: Counter[str] = Counter()
        self._seconds: defaultdict[frozenset[str], float] = defaultdict(float)
        self._since = clock()

    def enter(self, name: str) -> None:
        """Begin activity `name`."""
        if name not in self._active:  # the set of activities changes only then
            self._turn()
        self._active[name] += 1

    def leave(self, name: str) -> None:
        """End an activity that was entered before."""
        if self._active[name] == 1:
            self._turn()
            del self._active[name]
        else:
            self._active[name] -= 1

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Run the body as an activity."""
        self.enter(name)
        try:
            yield
        finally:
            self.leave(name)

    def lap(self) -> dict[frozenset[str], float]:
        """Return the seconds since the last call by set of concurrent activities, and reset them."""
        self._turn()
        seconds: dict[frozenset[str], float] = dict(self._seconds)
        self._seconds.clear()
        return seconds

    def _turn(self) -> None:
        now = self._clock()
        if now > self._since:
            self._seconds[frozenset(self._active)] += now - self._since
        self._since = now


def shares(seconds: Mapping[frozenset[str], float], of: Collection[str] | None = None) -> dict[str, float]:
    """Return the shares of time by activity, from the seconds of `Spans.lap`. `of`: activities that count; None: all.

    `<name>` is the share with that activity, `overlap` with two or more, `waiting` with none. Overlap is counted in
    each of its activities, so `sum of activities - overlap + waiting = 1` for two activities.
    """
    total = sum(seconds.values())
    result = {"waiting": 0.0, "overlap": 0.0}
    for together, lasted in seconds.items() if total > 0 else ():
        names = together if of is None else together.intersection(of)
        kind = "waiting" if not names else "overlap" if len(names) > 1 else None
        for name in (*names, *([kind] if kind else [])):
            result[name] = result.get(name, 0.0) + lasted / total
    return result


def shares_by_cause(
    seconds: Mapping[frozenset[str], float], busy: Collection[str], causes: Sequence[tuple[str, str]]
) -> dict[str, float]:
    """Return the share of time, from the seconds of `Spans.lap`, in which a part was `busy`, and its idle shares by
    cause; they add up to 1.

    Args:
        busy: activities of the part itself.
        causes: (activity of other parts, its name as a cause), by priority: the first one in progress is the cause, or
            `other` if there is none.
    """
    total = sum(seconds.values())
    result = dict.fromkeys(("busy", *(cause for _, cause in causes), "other"), 0.0)
    for together, lasted in seconds.items() if total > 0 else ():
        idle = next((cause for name, cause in causes if name in together), "other")
        result["busy" if together.intersection(busy) else idle] += lasted / total
    return result
