"""Reports of stalls, when no rollout of a run finishes for a while, and the time spent waiting for a group's last
rollout. `observe.waiting` reports what a command waits for outside of rollouts."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

from sparring.observe.spans import Spans
from sparring.rollout.phases import Waits


class Stalls:
    """Detector of stalls among the rollouts of one runner. A stall is reported once, and again only when another phase
    has become the oldest.

    Args:
        stalled_s: seconds without a finished attempt after which a stall is reported.
    """

    def __init__(self, waits: Waits, stalled_s: float, report: Callable[[str], None]) -> None:
        self._waits, self._stalled_s, self._report = waits, stalled_s, report
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_armed = False
        self._last = 0.0
        self._reported: tuple[str, str] | None = None

    def start(self) -> None:
        """Start the clock and the regular check, unless both are running."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop or not self._is_armed:
            self._loop, self._is_armed, self._last = loop, True, loop.time()
            loop.call_at(self._last + self._stalled_s, self._report_stall, loop)

    def reset(self) -> None:
        """Restart the clock after an attempt has finished."""
        self._last, self._reported = asyncio.get_running_loop().time(), None

    def _report_stall(self, loop: asyncio.AbstractEventLoop) -> None:
        """Report a stall if it is due, and schedule the next check while any phase is running."""
        if loop is not self._loop:
            return
        now, oldest = loop.time(), self._waits.oldest()
        if oldest is None:
            self._is_armed = False
            return
        due = self._last + self._stalled_s
        stalled = now >= due  # `now - due` may be rounded below 0
        if stalled and self._reported != (oldest.rollout_id, str(oldest)):
            self._reported = (oldest.rollout_id, str(oldest))
            self._report(
                f"no rollout has finished for {now - self._last:.0f} s: {oldest.rollout_id} has been in "
                f"phase {oldest} for {now - oldest.since:.0f} s"
            )
        loop.call_at(now + self._stalled_s if stalled else due, self._report_stall, loop)


class Straggler:
    """Timer of stragglers: measures the time in which the group that is trained next waits for its last rollout.

    Args:
        spans: timer of activities; the time counts as `straggling`.
    """

    def __init__(self, spans: Spans) -> None:
        self._spans = spans
        self._left: Counter[int] = Counter()
        self._awaited: int | None = None
        self._counts = False
        self._lack_one: set[int] = set()

    def begin(self, index: int, rollouts: int) -> None:
        """Add a number of running rollouts to group `index`."""
        self._left[index] += rollouts

    def end(self, index: int) -> None:
        """Count a rollout of group `index` that has ended."""
        self._left[index] -= 1
        if self._left[index] == 1:
            self._lack_one.add(index)
        elif not self._left[index]:
            del self._left[index]
            self._lack_one.discard(index)
        self._turn()

    def await_group(self, index: int | None) -> None:
        """Set the group that is next to be trained, or None."""
        self._awaited = index
        self._turn()

    def _turn(self) -> None:
        counts = self._awaited in self._lack_one
        if counts and not self._counts:
            self._spans.enter("straggling")
        elif self._counts and not counts:
            self._spans.leave("straggling")
        self._counts = counts
