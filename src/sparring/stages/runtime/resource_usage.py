"""Wall-clock time of a stage and peak memory of a run over all their processes, killed ones included."""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from sparring.protocols import Store

EVERY_S = 10.0
"""Seconds between two records; a killed process loses at most this time."""
PEAK = "peak_rss_bytes"


@asynccontextmanager
async def elapsing(store: Store, stage: str, every_s: float = EVERY_S) -> AsyncIterator[None]:
    """Add the time in the context to the stage's recorded time, every few seconds and at the end."""
    before, began = wall_s(store, stage), time.monotonic()

    def note() -> None:
        store.put(_key(stage), before + time.monotonic() - began)
        peak_rss(store)

    async def noting() -> None:
        while True:
            await asyncio.sleep(every_s)
            note()

    noted = asyncio.create_task(noting())
    try:
        yield
    finally:
        noted.cancel()
        with suppress(asyncio.CancelledError):
            await noted
        note()


def wall_s(store: Store, stage: str) -> float:
    """Return the seconds that all processes of a stage took."""
    return float(store.get(_key(stage)) or 0.0)


def peak_rss(store: Store) -> int:
    """Store and return the peak resident memory of all processes of the run so far, in bytes."""
    now = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    earlier = int(store.get(PEAK) or 0)
    if now > earlier:
        store.put(PEAK, now)
    return max(now, earlier)


def _key(stage: str) -> str:
    return f"wall/{stage}"
