"""A gateway's door on a thread of its own, for suites without an event loop of ours."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sparring.gateway.server import Door, open_door
from sparring.protocols import ToolHost
from sparring.record.recorder import RecordedSession, Recorder
from sparring.render.demonstrate import reply_tokens
from sparring.testing.scripted_engine import ScriptedEngine
from sparring.testing.toy import toy_renderer, toy_task
from sparring.types import Limits, Message


@contextmanager
def door_on_a_thread(
    reply: Message, tools: ToolHost | None = None, *, thinking: bool = False
) -> Iterator[tuple[Door, RecordedSession]]:
    """A session that always answers `reply`, behind a door."""
    renderer = toy_renderer(thinking=thinking)
    limits = Limits(max_turns=10**6, max_tokens=10**9, max_tool_calls=10**6)
    engine = ScriptedEngine(lambda request: reply_tokens(renderer, reply, tools.tools if tools else ()))
    recorder = Recorder(engine, renderer, max_context=8000)
    session = recorder.open(toy_task(), rollout_id="rl/0/0", seed=7, limits=limits)
    opened: list[Any] = []
    is_open, close, loop = threading.Event(), asyncio.Event(), asyncio.new_event_loop()

    async def main() -> None:
        async with open_door(session) as door:
            door.tools = tools
            opened.append(door)
            is_open.set()
            await close.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(main(),))
    thread.start()
    assert is_open.wait(60)
    try:
        yield opened[0], session
    finally:
        loop.call_soon_threadsafe(close.set)
        thread.join()
        loop.close()
