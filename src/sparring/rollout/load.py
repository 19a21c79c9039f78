"""Concurrency limits of training's rollouts, and of the rollouts of an evaluation alongside training.

The limit for training's rollouts follows the engine's load. When the conversations do not fit into the KV cache
together, the engine evicts some and must compute their keys and values again. Then the limit is cut by a factor.
Otherwise it grows step by step. The engine serves the earliest admitted rollout first, so the latest ones are evicted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

CUT = 0.85
"""Factor on the limit after an overload."""

GROWTH = 0.5
"""Growth of the limit after a period without overload. In a period, the rollouts send as many requests as the limit."""

MOST_LOST = 0.25
"""Share of recomputed tokens among all that the engine computes, above which the engine is overloaded."""


class Limiter:
    """Semaphore with a variable limit.

    Args:
        limit: returns the current limit, at least 1.
    """

    def __init__(self, limit: Callable[[], int]) -> None:
        self._limit = limit
        self._opened = asyncio.Event()
        self.in_use = 0

    async def acquire(self) -> None:
        """Wait for a free place and take it."""
        while self.in_use >= self._limit():
            self._opened.clear()
            await self._opened.wait()
        self.in_use += 1

    def release(self) -> None:
        """Give a place back."""
        self.in_use -= 1
        self._opened.set()


class Places:
    """Concurrency limit of training's rollouts that follows the engine's load: additive increase, multiplicative
    decrease (AIMD).

    The limit changes only when a rollout ends, so it affects only the start of rollouts. After a cut, the limit does
    not change until the rollouts in excess of it have ended; until then the engine's metrics show the load before the
    cut.

    Args:
        most: upper bound and initial limit, at least 1.
        metrics: returns the engine's metrics. The limit stays at `most` if the metrics lack `kv_lost_tokens`, the
            number of recomputed tokens.
    """

    def __init__(self, most: int, metrics: Callable[[], Mapping[str, float]] = dict) -> None:
        self._most, self._metrics = most, metrics
        self._limit = float(most)
        self._limiter = Limiter(lambda: self.limit)
        self._before: Mapping[str, float] | None = None

    @property
    def limit(self) -> int:
        """Current limit, at least 1."""
        return int(self._limit)

    @property
    def in_use(self) -> int:
        """Number of places taken; after a cut it may exceed the limit for a while."""
        return self._limiter.in_use

    async def acquire(self) -> None:
        """Wait for a free place and take it."""
        if self._before is None:
            self._before = self._metrics()
        await self._limiter.acquire()

    def release(self) -> None:
        """Give a place back, and adapt the limit to the engine's load."""
        self._adapt(self._metrics())
        self._limiter.release()

    def _adapt(self, now: Mapping[str, float]) -> None:
        if self._before is None or "kv_lost_tokens" not in now or self.in_use > self.limit:
            self._before = now  # no metrics, or the last cut has had no effect yet
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
    """Share of the concurrent rollouts for an evaluation alongside training.

    The evaluation has places of its own in addition to training's; their number is `share` of all places. Its rollouts
    queue at the engine with the priority of the training group that is admitted next. So under a saturated engine the
    evaluation gets its share of the throughput, and training loses no more than that.

    Args:
        share: share of all places, above 0 and below 1.
        most: upper bound of the evaluation's places.
        admission: returns the index of the group that training admits next.

    Attributes:
        admission: returns the index of the group that training admits next, as given.
    """

    def __init__(self, places: Places, share: float, most: int, admission: Callable[[], int]) -> None:
        self._places, self._ratio = places, share / (1.0 - share)
        self._limiter = Limiter(lambda: self.limit)
        self.most, self.admission = most, admission

    @property
    def limit(self) -> int:
        """Current number of places for evaluation, at least 1."""
        return min(self.most, max(1, int(self._places.limit * self._ratio + 1e-9)))

    async def __aenter__(self) -> None:
        await self._limiter.acquire()

    async def __aexit__(self, *raised: object) -> None:
        self._limiter.release()
