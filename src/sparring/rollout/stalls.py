"""Waits of a run: said once no rollout has finished for a while; and the time that a group's last rollout takes."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

from sparring.observe.spans import Spans
from sparring.rollout.phases import Waits


class Stalls:
    """Watch over the rollouts of one runner. A stall is said once, and again only when another wait is the oldest.

    Args:
        waits: the phases that are under way.
        stalled_s: seconds without a finished attempt.
        report: called with the sentence.
    """

    def __init__(self, waits: Waits, stalled_s: float, report: Callable[[str], None]) -> None:
        self._waits, self._stalled_s, self._report = waits, stalled_s, report
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_armed = False
        self._last = 0.0
        self._reported: tuple[str, str] | None = None

    def start(self) -> None:
        """Take note that a rollout begins."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop or not self._is_armed:
            self._loop, self._is_armed, self._last = loop, True, loop.time()
            loop.call_at(self._last + self._stalled_s, self._look, loop)

    def reset(self) -> None:
        """Take note that an attempt has finished."""
        self._last, self._reported = asyncio.get_running_loop().time(), None

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        """Say what is waited for if it is time, and look again as long as anything is."""
        if loop is not self._loop:
            return
        now, oldest = loop.time(), self._waits.oldest()
        if oldest is None:
            self._is_armed = False
            return
        due = self._last + self._stalled_s
        stalled = now >= due  # the difference of the two may round below what was waited for
        if stalled and self._reported != (oldest.rollout_id, str(oldest)):
            self._reported = (oldest.rollout_id, str(oldest))
            self._report(
                f"no rollout has finished for {now - self._last:.0f} s: {oldest.rollout_id} has been in "
                f"phase {oldest} for {now - oldest.since:.0f} s"
            )
        loop.call_at(now + self._stalled_s if stalled else due, self._look, loop)


class Straggler:
    """Account of the time in which the group that is awaited lacks a single rollout, all others having ended.

    Args:
        spans: where it counts as the activity `straggling`.
    """

    def __init__(self, spans: Spans) -> None:
        self._spans = spans
        self._left: Counter[int] = Counter()
        self._awaited: int | None = None
        self._counts = False
        self._lack_one: set[int] = set()

    def begin(self, index: int, rollouts: int) -> None:
        """Take note that group `index` has so many rollouts more to end."""
        self._left[index] += rollouts

    def end(self, index: int) -> None:
        """Take note that a rollout of group `index` has ended."""
        self._left[index] -= 1
        if self._left[index] == 1:
            self._lack_one.add(index)
        elif not self._left[index]:
            del self._left[index]
            self._lack_one.discard(index)
        self._turn()

    def await_group(self, index: int | None) -> None:
        """Take note of the group that is awaited from now on; None for none."""
        self._awaited = index
        self._turn()

    def _turn(self) -> None:
        counts = self._awaited in self._lack_one
        if counts and not self._counts:
            self._spans.enter("straggling")
        elif self._counts and not counts:
            self._spans.leave("straggling")
        self._counts = counts
