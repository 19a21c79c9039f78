"""Processes of engines that die: when they are started again, and when no more."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sparring.cluster.engine_process import MOST_DEATHS, DeadEngine, EngineProcess
from sparring.cluster.kept_engines import Ended, KeptEngines
from sparring.engine.adapters.remote import RemoteEngine
from sparring.engine.fleet import Fleet
from sparring.errors import EngineError

URL = "http://127.0.0.1:1"
DYING = f"echo serving on {URL}; echo start $(wc -l < starts) >&2; echo >> starts; exit 3"
WAIT_S = 60.0
"""Only a failure waits so long."""


def process(script: str, folder: Path) -> EngineProcess:
    (folder / "starts").touch()
    return EngineProcess(("sh", "-c", f"cd {folder}; {script}", "sh"), "key", pause_s=0.001)


def deadline() -> float:
    return time.monotonic() + WAIT_S


@pytest.fixture
def closed() -> Iterator[list[EngineProcess]]:
    """Processes that are closed at the end."""
    processes: list[EngineProcess] = []
    yield processes
    for each in processes:
        each.close()


def wait_until_given_up(process: EngineProcess) -> DeadEngine:
    with pytest.raises(DeadEngine) as found:
        while time.monotonic() < deadline():
            process.find(WAIT_S)
    return found.value


def test_one_that_dies_again_and_again_is_given_up_with_the_end_of_its_log(
    tmp_path: Path, closed: list[EngineProcess]
) -> None:
    closed.append(dying := process(DYING, tmp_path))
    error = str(wait_until_given_up(dying))
    assert dying.starts == MOST_DEATHS and f"{MOST_DEATHS} deaths in a row" in error
    assert f"start {MOST_DEATHS - 1}" in error and "status 3" in error


def test_one_that_never_answers_is_started_once(tmp_path: Path, closed: list[EngineProcess]) -> None:
    closed.append(never := process("echo no module >&2; exit 2", tmp_path))
    assert "no module" in str(wait_until_given_up(never)) and never.starts == 1


def test_a_reply_begins_the_count_of_deaths_anew(tmp_path: Path, closed: list[EngineProcess]) -> None:
    living = f"echo serving on {URL}; echo >> starts; exec cat"
    closed.append(each := process(living, tmp_path))
    for number in range(1, 2 * MOST_DEATHS):
        assert each.find(WAIT_S) == URL and each.starts == number
        each.replied()
        each.kill()
    each.find(WAIT_S)
    each.kill()
    each.kill()  # of the one that was found: not of the next
    each.find(WAIT_S)
    assert each.starts == 2 * MOST_DEATHS + 1


def test_a_stage_ends_when_the_process_of_a_lost_engine_is_given_up(
    tmp_path: Path, closed: list[EngineProcess]
) -> None:
    closed.append(dying := process(DYING, tmp_path))
    ended = Ended()
    kept = KeptEngines([dying], key="", within_s=WAIT_S, dead=ended)
    assert kept.find() == [URL]

    async def scenario() -> None:
        engine = RemoteEngine(URL, awaited=True)
        async with asyncio.timeout(WAIT_S), ended.within():
            while True:  # as the fleet does, as long as it does not answer
                kept.lost(engine)
                await asyncio.sleep(0)

    with pytest.raises(DeadEngine, match="deaths in a row"):
        asyncio.run(scenario())


def test_an_engine_that_is_given_up_leaves_the_run_to_those_that_serve(
    tmp_path: Path, closed: list[EngineProcess], caplog: pytest.LogCaptureFixture
) -> None:
    """It is told once, however often the fleet looks for it; the stage ends when no other one is left."""
    closed.append(dying := process(DYING, tmp_path))
    ended = Ended()
    kept = KeptEngines([dying], key="", within_s=WAIT_S, dead=ended)
    engine, other = (RemoteEngine(url, awaited=True) for url in (URL, f"{URL}1"))
    assert kept.find() == [URL]
    kept.fleet = Fleet([other], absent=[engine], keeper=kept)

    async def scenario() -> None:
        async with asyncio.timeout(WAIT_S), ended.within():
            while not caplog.records or kept.free:
                kept.lost(engine)
                await asyncio.sleep(0)
            for _ in range(1000):
                kept.lost(engine)
                await asyncio.sleep(0)
            kept.fleet = None
            while True:
                kept.lost(engine)
                await asyncio.sleep(0)

    with pytest.raises(DeadEngine, match="deaths in a row"):
        asyncio.run(scenario())
    assert [record.message.count("deaths in a row") for record in caplog.records] == [1]


def test_a_stage_that_the_user_interrupts_is_cancelled() -> None:
    ended = Ended()

    async def scenario() -> None:
        async with ended.within():
            body = asyncio.current_task()
            assert body is not None
            body.cancel()
            ended(EngineError("late"))
            await asyncio.sleep(WAIT_S)

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(scenario())
