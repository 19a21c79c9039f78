"""Load that rollouts put on what they share: boxes that start."""

from __future__ import annotations

import asyncio

from sparring.protocols import Boxes, Sandbox
from sparring.types import BoxSpec


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
