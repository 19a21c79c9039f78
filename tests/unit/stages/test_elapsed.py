"""Time of a stage whose process is killed."""

from __future__ import annotations

import asyncio
from pathlib import Path

from sparring.stages.runtime.resource_usage import elapsing, peak_rss, wall_s
from sparring.store.sqlite import SqliteStore


def test_a_stage_that_is_killed_has_its_time_in_the_store(tmp_path: Path) -> None:
    """What another process reads while the stage is still running is what is left of one that is killed then."""

    async def stage(store: SqliteStore) -> float:
        async with elapsing(store, "rl", every_s=0.0):
            before = wall_s(store, "rl")
            while wall_s(store, "rl") == before:
                await asyncio.sleep(0)
            kept = wall_s(store, "rl")
            assert peak_rss(store) == store.get("peak_rss_bytes") > 0
        assert wall_s(store, "rl") >= kept > before
        return kept

    store = SqliteStore(tmp_path / "store.sqlite")
    try:
        first = asyncio.run(stage(store))
        assert asyncio.run(stage(store)) > first and wall_s(store, "sft") == 0.0
    finally:
        store.close()
