"""Turns that end together share one commit, and nothing else."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from sparring.errors import StoreError
from sparring.log import LogEntry
from sparring.record.turns import TurnQueue
from sparring.store.sqlite import SqliteStore
from sparring.types import Message, Segment, ToolCall

SEGMENT = Segment(index=0, parent=None, source="prompt", tokens=(1, 2))
CALL = ToolCall(id="call_0", name="tool", arguments={"x": object()})
UNWRITABLE = replace(SEGMENT, message=Message(role="assistant", content="", tool_calls=(CALL,)))

KILLED = """
import asyncio, os, signal, sys
sys.path.insert(0, sys.argv[2])
from test_turns import SEGMENT
from sparring.record.turns import TurnQueue
from sparring.store.sqlite import SqliteStore

async def main():
    queue = TurnQueue(SqliteStore(sys.argv[1]))
    await asyncio.gather(queue.put("counted/0", [SEGMENT]), queue.put("counted/1", [SEGMENT]))
    print("counted", flush=True)
    late = asyncio.create_task(queue.put("late", [SEGMENT]))
    late.add_done_callback(lambda _: print("late", flush=True))
    asyncio.get_running_loop().call_soon(os.kill, os.getpid(), signal.SIGKILL)  # behind its start, before its commit
    await late

asyncio.run(main())
"""


class CountedStore(SqliteStore):
    """Counts commits of turns."""

    commits = 0

    def append_turns(self, turns: object, entries: object = ()) -> None:
        """As the store."""
        self.commits += 1
        super().append_turns(turns, entries)


def test_turns_of_one_tick_are_one_commit(tmp_path: Path) -> None:
    store = CountedStore(tmp_path / "store.sqlite")
    queue = TurnQueue(store)

    async def talk() -> None:
        await asyncio.gather(*(queue.put(f"rl/0/{n}", [replace(SEGMENT, tokens=(n,))]) for n in range(64)))
        assert store.commits == 1
        await queue.put("rl/0/7", [replace(SEGMENT, tokens=(100,))])
        assert store.commits == 2

    asyncio.run(talk())
    assert all(store.turns(f"rl/0/{n}")[0].tokens == (n,) for n in range(64))
    assert [segment.tokens for segment in store.turns("rl/0/7")] == [(7,), (100,)]
    store.close()


def test_entries_of_the_log_share_the_commit_of_the_turns(tmp_path: Path) -> None:
    store = CountedStore(tmp_path / "store.sqlite")
    queue = TurnQueue(store)
    entries = [LogEntry(stage="rl", kind="observation", name="rl/0/1", data={"digest": n}) for n in range(3)]
    odd = LogEntry(stage="rl", kind="limit", name="rl/0/2", data={"seconds": object()})

    async def talk() -> list[object]:
        one, *two = entries
        written = [queue.put("rl/0/1", [SEGMENT]), queue.record(one), queue.record(*two)]
        await asyncio.gather(*written)
        assert store.commits == 1
        return await asyncio.gather(queue.record(odd), queue.put("rl/0/3", [SEGMENT]), return_exceptions=True)

    error, written = asyncio.run(talk())
    assert isinstance(error, StoreError) and written is None
    assert [entry for _, entry in store.entries("rl")] == entries and store.turns("rl/0/3") == [SEGMENT]
    store.close()


def test_a_turn_that_cannot_be_written_does_not_affect_others(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "store.sqlite")
    queue = TurnQueue(store)

    async def talk() -> list[object]:
        turns = [("a", SEGMENT), ("b", UNWRITABLE), ("c", SEGMENT)]
        puts = [queue.put(name, [segment]) for name, segment in turns]
        return await asyncio.gather(*puts, return_exceptions=True)

    first, second, third = asyncio.run(talk())
    assert first is None and third is None
    assert isinstance(second, StoreError) and "TypeError" in str(second)
    assert store.turns("a") == [SEGMENT] and store.turns("b") == [] and store.turns("c") == [SEGMENT]
    store.close()


def test_a_cancelled_caller_is_written_and_delays_nobody(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "store.sqlite")
    queue = TurnQueue(store)

    async def talk() -> None:
        cancelled = asyncio.create_task(queue.put("cancelled", [SEGMENT]))
        other = asyncio.create_task(queue.put("other", [SEGMENT]))
        asyncio.get_running_loop().call_soon(cancelled.cancel)  # behind its start, before the commit
        await other
        with pytest.raises(asyncio.CancelledError):
            await cancelled

    asyncio.run(talk())
    assert store.turns("cancelled") == store.turns("other") == [SEGMENT]
    store.close()


def test_a_kill_before_the_commit_loses_only_unacknowledged_turns(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    command = [sys.executable, "-c", KILLED, str(path), str(Path(__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert done.stdout.split() == ["counted"]
    store = SqliteStore(path)
    assert store.turns("counted/0") == store.turns("counted/1") == [SEGMENT]
    assert store.turns("late") == []
    store.close()
