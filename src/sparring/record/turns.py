"""Turns on their way into the store: all that end in one tick of the event loop share one commit."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from sparring.errors import SparringError, StoreError, boundary
from sparring.protocols import Store
from sparring.types import Segment

Turn = tuple[str, Sequence[Segment]]


class TurnQueue:
    """The turns of all sessions, in the order they end. A commit costs much the same for one turn as for a hundred, and
    an engine's step ends many at once.

    Args:
        store: where they go. A turn counts when its commit is done; a crash before that loses a turn nobody was told
            about.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._waiting: list[tuple[Turn, asyncio.Future[None]]] = []

    async def put(self, trajectory: str, segments: Sequence[Segment]) -> None:
        """Return when the turn is durable. A caller that is cancelled while it waits has its turn written all the same.

        Raises:
            StoreError: this turn could not be written; turns that could be are.
        """
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        if not self._waiting:
            loop.call_soon(self._commit)  # after everything that is ready to run now: it may end turns as well
        self._waiting.append(((trajectory, segments), done))
        await done

    def _commit(self) -> None:
        waiting, self._waiting = self._waiting, []
        if self._written([turn for turn, _ in waiting]) is None:
            answers: list[SparringError | None] = [None] * len(waiting)
        else:  # nothing was written: each turn answers for itself
            answers = [self._written([turn]) for turn, _ in waiting]
        for (_, done), error in zip(waiting, answers, strict=True):
            if done.done():
                continue
            if error is None:
                done.set_result(None)
            else:
                done.set_exception(error)

    def _written(self, turns: Sequence[Turn]) -> SparringError | None:
        """Write all or none; why not, where it was none."""
        try:
            with boundary(StoreError, "store: a turn that cannot be written"):
                self._store.append_turns(turns)
        except SparringError as error:
            return error
        return None
