"""Wall clock of a stage and peak memory of a run, over all their processes: kept while a stage runs, so that one that
is killed counts as well."""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from sparring.protocols import Store

EVERY_S = 10.0
"""Seconds between two notes: a process that is killed loses at most so many."""
PEAK = "peak_rss_bytes"


@asynccontextmanager
async def elapsing(store: Store, stage: str, every_s: float = EVERY_S) -> AsyncIterator[None]:
    """Add the time that the context lasts to what the stage took before, every few seconds and at the end."""
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
    """Return the seconds that a stage took, in all processes that worked at it."""
    return float(store.get(_key(stage)) or 0.0)


def peak_rss(store: Store) -> int:
    """Return the peak resident memory of this process and the earlier ones of the run, in bytes, and store it."""
    now = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    earlier = int(store.get(PEAK) or 0)
    if now > earlier:
        store.put(PEAK, now)
    return max(now, earlier)


def _key(stage: str) -> str:
    return f"wall/{stage}"
