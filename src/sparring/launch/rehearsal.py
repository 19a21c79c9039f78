"""Rollouts that are played before a run. Workers claim these rollouts at a separate server, so that no worker of the
run itself is involved."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from sparring.errors import refusal
from sparring.harness.by_environment import behind
from sparring.harness.preset import KEY, fill
from sparring.harness.workers import NAME as WORKERS
from sparring.launch.run_server import KEYS, new_keys, write_keys
from sparring.stages.context import Context

if TYPE_CHECKING:
    from sparring.gateway.workers import RunKeys
    from sparring.stages.preflight.workers import Rehearsal

T = TypeVar("T")
OPTION = "--worker"
HERE = "127.0.0.1:0"

CLAIMED_WITHIN_S = 60.0
"""Seconds within which the user's worker must claim a rollout. Its imports may take long."""


async def rehearse(
    context: Context, play: Callable[[Context, Rehearsal | None], Awaitable[T]], command: Sequence[str] = ()
) -> T:
    """Call a function that plays rollouts before the run begins. They are played as in the run: if the run has workers,
    a worker claims each rollout by HTTP.

    Args:
        play: called with the context of the rollouts, and with the rehearsal of the workers, or None if the run has no
            workers.
        command: command of the user's worker, with `{keys}`, `{url}` and `{key}` in it; empty uses a worker of
            Sparring.

    Raises:
        BadInput: the program is missing, the recipe has no workers, or the worker ended before `play` did.
    """
    if WORKERS not in context.config.harnesses:
        if command:
            raise refusal(OPTION, f"a recipe that workers play: {KEY} = '{WORKERS}'", "another", "leave it out")
        return await play(context, None)
    from sparring.gateway.server import Gateway, open_door
    from sparring.stages.preflight.workers import Rehearsal

    gateway, rehearsal = Gateway(), Rehearsal(command)
    keys = new_keys()
    doors = partial(open_door, models=context.config.rollout.models, gateway=gateway)
    within_s = CLAIMED_WITHIN_S if command else None
    async with gateway.open_outside(keys, HERE, context.config.rollout.gateway.lease_s) as url:
        harness = behind(context.harness, doors, lambda: gateway.workers.leases, within_s)
        if command:
            working = asyncio.create_task(_worker(command, url, keys, context.folder))
        else:
            working = asyncio.create_task(asyncio.to_thread(rehearsal.play, url, keys.worker))
        playing = asyncio.ensure_future(play(replace(context, harness=harness), rehearsal))
        try:
            await asyncio.wait({working, playing}, return_when=asyncio.FIRST_COMPLETED)
            if playing.done():
                return await playing
            await working
            raise refusal(OPTION, "a worker that claims rollouts until the run is over", "its end", "correct it")
        finally:
            for task in (playing, working):  # a thread continues until the run is over
                task.cancel()
            await asyncio.gather(playing, working, return_exceptions=True)


async def _worker(command: Sequence[str], url: str, keys: RunKeys, folder: Path) -> None:
    """Run the user's worker until it ends. If cancelled, kill it and its children."""
    write_keys(folder / KEYS, url, keys)
    values = {"keys": folder / KEYS, "url": url, "key": keys.worker}
    words = [fill(word, values) for word in command]
    try:
        process = await asyncio.create_subprocess_exec(*words, stdin=asyncio.subprocess.DEVNULL, start_new_session=True)
    except OSError as error:
        raise refusal(OPTION, "a program that can be run", f"{words[0]!r}: {error}", "correct it") from error
    try:
        status = await process.wait()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # and what it started
        await process.wait()
    if status:
        expected = "a worker that claims rollouts until the run is over"
        raise refusal(OPTION, expected, f"its end with {status}", "correct it; what it wrote stands above")
