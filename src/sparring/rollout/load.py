"""Load that rollouts put on what they share: how many are in flight, which part of them evaluates, how many boxes
start at once.

The number of places for training's rollouts follows the engine. Where conversations do not fit into its cache together,
each costs the others what was computed for them, and the engine computes again instead of sampling: then the places are
cut by a share. Where that does not happen, one is added at a time. The engine itself serves the rollout first that was
admitted first, so it is always the youngest that give way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from sparring.protocols import Boxes, Sandbox
from sparring.types import BoxSpec

CUT = 0.85
"""Share of the places that an overload leaves."""

GROWTH = 0.5
"""Places that are added where an engine that was asked once for each place shows no overload."""

MOST_LOST = 0.25
"""Tokens that are computed again, as a share of all that the engine computes: more are an overload."""


class Limiter:
    """Limiter of how many are in flight at once: as many as its limit says at the moment.

    Args:
        limit: the number, at least 1.

    Attributes:
        in_use: places that are taken.
    """

    def __init__(self, limit: Callable[[], int]) -> None:
        self._limit = limit
        self._opened = asyncio.Event()
        self.in_use = 0

    async def acquire(self) -> None:
        """Take a place; waits for one."""
        while self.in_use >= self._limit():
            self._opened.clear()
            await self._opened.wait()
        self.in_use += 1

    def release(self) -> None:
        """Give a place back."""
        self.in_use -= 1
        self._opened.set()


class Places:
    """Places of training's rollouts, as many as the engine bears: additive growth, multiplicative cut.

    They change only when a rollout gives its place back, so they decide when a rollout begins and nothing else. A cut
    is not followed by another before as many rollouts have ended as it took: until then what the engine reports is the
    load from before.

    Args:
        most: the upper bound, and the number at the start; at least 1.
        metrics: the engine's; one that does not report what is computed again (`kv_lost_tokens`) leaves the bound
            alone.
    """

    def __init__(self, most: int, metrics: Callable[[], Mapping[str, float]] = dict) -> None:
        self._most, self._metrics = most, metrics
        self._limit = float(most)
        self._limiter = Limiter(lambda: self.limit)
        self._before: Mapping[str, float] | None = None

    @property
    def limit(self) -> int:
        """Places that there are now, at least 1."""
        return int(self._limit)

    @property
    def in_use(self) -> int:
        """Places that are taken; for a while after a cut more than there are."""
        return self._limiter.in_use

    async def acquire(self) -> None:
        """Take a place; waits for one."""
        if self._before is None:
            self._before = self._metrics()
        await self._limiter.acquire()

    def release(self) -> None:
        """Give a place back, and look at how the engine bears the load."""
        self._follow(self._metrics())
        self._limiter.release()

    def _follow(self, now: Mapping[str, float]) -> None:
        """Set the number of places by what the engine reports."""
        if self._before is None or "kv_lost_tokens" not in now or self.in_use > self.limit:
            self._before = now  # nothing is reported, or a cut has not taken effect
            return
        grown = {name: value - self._before.get(name, 0.0) for name, value in now.items()}
        requests = grown.get("kv_hits", 0.0) + grown.get("kv_misses", 0.0)
        if 0 <= requests < self._limit:
            return
        self._before = now
        computed = grown.get("prefill_tokens", 0.0) + grown.get("generated_tokens", 0.0)
        if grown["kv_lost_tokens"] > MOST_LOST * computed >= 0:
            self._limit = max(1.0, CUT * self._limit)
        elif requests >= 0 and self.in_use >= self.limit and not now.get("waiting_now", 0.0):
            self._limit = min(float(self._most), self._limit + GROWTH)


class EvalShare:
    """Share of the rollouts in flight that an evaluation beside training has.

    It has places of its own, so many that they are this share of all while training fills its own. Its rollouts queue
    at the engine among training's, by when they begin, at the same priority: all that are admitted later wait for them.
    So under a saturated engine evaluation gets its share of the service, and training loses no more than that.

    Args:
        places: training's.
        share: of the rollouts in flight, above 0 and below 1.
        most: the upper bound.
        admission: returns the number of the group that training admits next.

    Attributes:
        most: the upper bound.
        admission: returns the number of the group that training admits next.
    """

    def __init__(self, places: Places, share: float, most: int, admission: Callable[[], int]) -> None:
        self._places, self._ratio = places, share / (1.0 - share)
        self._limiter = Limiter(lambda: self.limit)
        self.most, self.admission = most, admission

    @property
    def limit(self) -> int:
        """Places that evaluation has now, at least 1."""
        return min(self.most, max(1, int(self._places.limit * self._ratio + 1e-9)))

    async def __aenter__(self) -> None:
        await self._limiter.acquire()

    async def __aexit__(self, *raised: object) -> None:
        self._limiter.release()


class CappedBoxes:
    """Pool of boxes of which a limited number start at once. Implements `protocols.Boxes`.

    Args:
        pool: makes the boxes.
        most: boxes that may be starting at once, at least 1.

    Attributes:
        pool: makes the boxes, uncapped.
        starts: a place for each box that may be starting, handed out in the order of requests.
    """

    def __init__(self, pool: Boxes, most: int) -> None:
        self.pool = pool
        self.starts = asyncio.Semaphore(most)

    async def take(self, spec: BoxSpec) -> Sandbox:
        """Open a box of this spec, once fewer than `most` are starting."""
        async with self.starts:
            return await self.pool.take(spec)

    async def close(self) -> None:
        """End every box."""
        await self.pool.close()
