"""All that a turn costs the controller, for benchmarks/scale.py."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

from common.appending import AppendingRenderer
from rollouts import GROUP_SIZE, GROUPS, Released, TalkFactory, scheduler_of

from sparring.generation import Sampling
from sparring.rollout.window import Window
from sparring.stages.runtime.garbage import fewer_collections
from sparring.store.sqlite import SqliteStore

NEW = 500
"""Maximum number of tokens of a reply."""
TURNS = 8
"""Turns of a conversation: with 500 tokens each they have 2,000 tokens of context on average."""


async def played(engine: Any, store_path: str, steps: int) -> list[float]:
    """Return the processor milliseconds of this process per turn, of each step of 64 conversations; the first, which
    warms up, is left out."""
    store, window = SqliteStore(f"{store_path}.sqlite"), Window(GROUPS, 0, steps + 1)
    sampling, factory = Sampling(max_tokens=NEW, stop=(0,), seed=1), TalkFactory(TURNS)
    scheduler = scheduler_of(Released(engine, window), AppendingRenderer(), factory, store, window, sampling)
    times, groups = [time.process_time()], 0
    with fewer_collections():
        async for _ in scheduler.groups():
            groups += 1
            if groups % GROUPS == 0:
                times.append(time.process_time())
                window.release(groups // GROUPS)
            if groups == GROUPS * (steps + 1):
                break
    await scheduler.close()
    await engine.close()
    store.close()
    turns = GROUPS * GROUP_SIZE * TURNS
    return [1e3 * (end - begin) / turns for begin, end in pairwise(times[1:])]
