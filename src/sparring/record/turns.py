"""Queue of turns and log entries for the store: all entries of one tick of the event loop share one commit."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from sparring.errors import SparringError, StoreError, boundary
from sparring.log import LogEntry
from sparring.protocols import Store
from sparring.types import Segment

Turn = tuple[str, Sequence[Segment]]
Record = tuple[Sequence[Turn], Sequence[LogEntry]]


class TurnQueue:
    """Queue of the turns and log entries of all sessions, in order of arrival. A commit costs about the same for one
    turn as for a hundred, and one step of an engine ends many turns.

    Args:
        store: store to which turns and entries are written. A turn counts once its commit is done. A crash before the
            commit loses only turns whose clients were not answered yet.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._waiting: list[tuple[Record, asyncio.Future[None]]] = []

    async def put(self, trajectory: str, segments: Sequence[Segment], entries: Sequence[LogEntry] = ()) -> None:
        """Write log entries and then a turn, and return when both are durable. If the caller is cancelled, both are
        written regardless. Raises StoreError if this turn could not be written."""
        await self._put(([(trajectory, segments)], entries))

    async def record(self, *entries: LogEntry) -> None:
        """Write log entries, all or none, and return when they are durable. If the caller is cancelled, the entries are
        written regardless. Raises StoreError if the entries could not be written."""
        await self._put(((), entries))

    def note(self, trajectory: str, segment: Segment) -> None:
        """Write a changed segment again with the next commit, without waiting for the commit."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        done.add_done_callback(_ignore_error)
        self._enqueue(([(trajectory, (segment,))], ()), done)

    async def _put(self, record: Record) -> None:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        self._enqueue(record, done)
        await done

    def _enqueue(self, record: Record, done: asyncio.Future[None]) -> None:
        if not self._waiting:  # after all callbacks that are ready now, because they may end turns as well
            asyncio.get_running_loop().call_soon(self._commit)
        self._waiting.append((record, done))

    def _commit(self) -> None:
        waiting, self._waiting = self._waiting, []
        if self._write([record for record, _ in waiting]) is None:
            answers: list[SparringError | None] = [None] * len(waiting)
        else:  # nothing was written: write each record by itself
            answers = [self._write([record]) for record, _ in waiting]
        for (_, done), error in zip(waiting, answers, strict=True):
            if done.done():
                continue
            if error is None:
                done.set_result(None)
            else:
                done.set_exception(error)

    def _write(self, records: Sequence[Record]) -> SparringError | None:
        """Write all records or none. Return the error if the records could not be written."""
        turns = [turn for record in records for turn in record[0]]
        entries = [entry for record in records for entry in record[1]]
        try:
            with boundary(StoreError, "store: a turn that cannot be written"):
                self._store.append_turns(turns, entries)
        except SparringError as error:
            return error
        return None


def _ignore_error(done: asyncio.Future[None]) -> None:
    """Retrieve the error of a write that no caller awaits; the next turn fails with the same error."""
    if not done.cancelled():
        done.exception()
