"""Suspension: a rollout gives its box and its cache back before a turn, and goes on later."""

from __future__ import annotations

import asyncio

from sparring.rollout.rebuild import Watch


class Suspension:
    """State of one rollout's suspension.

    Attributes:
        watch: over the attempt that is under way; None between attempts.
        requested: whether the rollout is to stop before its next turn.
    """

    def __init__(self) -> None:
        self.watch: Watch | None = None
        self.requested = False
        self._stopped: asyncio.Event = asyncio.Event()
        self._resumed: asyncio.Event = asyncio.Event()
        self._ended = False

    def begin(self, watch: Watch) -> None:
        """Take note of the attempt that begins."""
        self.watch = watch
        watch.replies.suspends = self.requested

    async def request(self) -> bool:
        """Return when the rollout has stopped, or ended without a further turn.

        Returns:
            Whether it has stopped.
        """
        self.requested = True
        if self.watch is not None:
            self.watch.replies.suspends = True
        await self._stopped.wait()
        return not self._ended

    async def stop(self) -> None:
        """Wait until the rollout is to go on."""
        self.watch = None
        self._stopped.set()
        await self._resumed.wait()
        self._resumed.clear()

    def resume(self) -> None:
        """Let the rollout go on."""
        self.requested = False
        self._stopped.clear()
        self._resumed.set()

    def end(self) -> None:
        """Take note that the rollout has ended."""
        self._ended = True
        self._stopped.set()
