"""Client, engine, and the run with its store, each a real process that is killed -9 in mid-stream: the record is in the
end that of one in which nobody was killed."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from forked import Forked
from killed_client import KILL_AT
from stored import sql

from sparring.engine.adapters.remote_client import RemoteClient
from sparring.gateway.server import Door, open_door
from sparring.record.recorder import Recorder
from sparring.store.sqlite import SqliteStore
from sparring.testing.toy import toy_renderer, toy_task
from sparring.types import Limits, Segment

HERE = Path(__file__).parent
Fate = tuple[str, int] | None
"""Of one turn: which process is killed, behind how many tokens; None: the turn is left alone."""


class Engine:
    """A scripted engine in a process that may be killed and started again at its address."""

    def __init__(self) -> None:
        self.port = 0

    async def start(self) -> None:
        words = (sys.executable, HERE / "scripted_server.py", str(self.port))
        self._process = await asyncio.create_subprocess_exec(*words, stdin=PIPE, stdout=PIPE)
        self.port = int(await self.line())

    async def line(self) -> str:
        assert self._process.stdout is not None
        return (await self._process.stdout.readline()).decode().strip()

    async def say(self, word: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word}\n".encode())
        await self._process.stdin.drain()

    async def kill(self) -> None:
        self._process.kill()
        await self._process.wait()


async def until(condition: Callable[[], Any]) -> None:
    while not condition():
        await asyncio.sleep(0)


async def sent(door: Door, messages: Sequence[Any]) -> Process:
    """A client's process that has sent a request."""
    body = json.dumps({"model": "policy", "messages": list(messages), "stream": True})
    host, _, port = door.url.removeprefix("http://").partition(":")
    words = (sys.executable, "-S", HERE / "killed_client.py", host, port, door.key, body)
    return await asyncio.create_subprocess_exec(*words, stdout=PIPE)


def text_of(output: bytes) -> str | None:
    """Return the text of a whole answer; None of one that is not whole."""
    lines = output.decode().splitlines()
    if "data: [DONE]" not in lines:
        return None
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    return "".join(choice["delta"].get("content") or "" for event in events for choice in event.get("choices", ()))


async def turn(door: Door, engine: Engine, messages: Sequence[Any], fate: Fate) -> str:
    """Take a turn. Who is killed is started again, and the client sends its request again, byte by byte."""
    if fate is not None:
        who, after = fate
        await engine.say(str(after))
        client = await sent(door, messages)
        assert await engine.line() == "waits"
        if who == "client":
            assert client.stdout is not None
            if after > 2:  # its first events are there
                while not (await client.stdout.readline()).startswith(b"data: {"):
                    pass
            client.kill()
            await client.wait()
            await until(lambda: door.exchanges.broken)
            await engine.say("GO ON")
        else:
            await engine.kill()
            output, _ = await client.communicate()
            assert text_of(output) is None
            assert output.startswith(b"503\n") or b'"error"' in output.splitlines()[-2], output
            await engine.start()
    output, _ = await (await sent(door, messages)).communicate()
    text = text_of(output)
    assert text is not None, output
    return text


async def conversation(folder: Path, fates: Sequence[Fate]) -> tuple[tuple[Segment, ...], list[Segment], list[Any]]:
    """Hold a conversation of as many turns. Return the session's record, the store's, and the client's."""
    store, engine = SqliteStore(folder / "store.sqlite"), Engine()
    await engine.start()
    remote = RemoteClient(f"http://127.0.0.1:{engine.port}")
    try:
        session = Recorder(remote, toy_renderer(), store, max_context=60_000).open(
            toy_task(), rollout_id="rl/0/0", seed=7, limits=Limits(max_turns=200, max_tokens=60_000)
        )
        messages: list[Any] = [{"role": "user", "content": "Begin."}]
        async with open_door(session) as door:
            for number, fate in enumerate(fates):
                text = await turn(door, engine, messages, fate)
                messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"Go on, {number}."}]
                await until(lambda: session.segments[-1].delivered)
        return session.segments, store.turns("rl/0/0"), messages
    finally:
        with suppress(ProcessLookupError):
            await engine.kill()
        await remote.close()
        store.close()


def check(tmp_path: Path, fates: Sequence[Fate]) -> None:
    """Check that a conversation with kills is that without: nothing lost, doubled or invented."""
    recorded = []
    for name, of_turns in (("left alone", [None] * len(fates)), ("killed", fates)):
        folder = tmp_path / name
        folder.mkdir()
        recorded.append(asyncio.run(conversation(folder, of_turns)))
    (alone, _, told), (segments, stored, messages) = recorded
    assert messages == told and segments == alone
    replies = [segment for segment in segments if segment.model is not None]
    assert [reply.message.content for reply in replies if reply.message] == [m["content"] for m in messages[1::2]]
    assert {reply.label for reply in replies} == {"agent"}
    latest = {segment.index: segment for segment in stored}
    assert {index: segment.tokens for index, segment in latest.items()} == {s.index: s.tokens for s in segments}
    assert {segment.label for segment in latest.values() if segment.model is not None} == {"agent"}


def test_a_client_and_an_engine_that_are_killed_in_mid_stream_lose_and_double_nothing(tmp_path: Path) -> None:
    check(tmp_path, [("client", 5), ("engine", 7), ("client", 0), None])


@pytest.mark.kills
@pytest.mark.slow
def test_seventy_kills_lose_and_double_nothing(tmp_path: Path) -> None:
    chance = random.Random(11)
    fates: list[Fate] = [(who, chance.randrange(0, 20)) for who in ("client",) * 35 + ("engine",) * 35]
    chance.shuffle(fates)
    check(tmp_path, [*fates, None])


def command(recipe: Path, name: str) -> list[str]:
    settings = (
        f"run.name={name}",
        'run.stages=["rl"]',
        f"rollout.harness={HERE / 'killed_client.py'}:agent",
        "rl.steps=6",
        "observe.lines_every_s=0",
    )
    return ["run", str(recipe), *(word for setting in settings for word in ("--set", setting))]


def outcome(folder: Path) -> tuple[list[Any], dict[str, str]]:
    """Return what a run sampled, and the checksums of its weights: without times, and without the tokens that the
    engine had in its cache, which ends with its process."""
    with closing(SqliteStore(folder / "store.sqlite", read_only=True)) as store:
        assert not sql(folder, "SELECT rollout FROM turns"), "every turn is in a group"
        sampled = [
            [
                (t.id, t.segments, replace(t.usage, cached_tokens=0))
                for rollout in group.rollouts
                for t in rollout.trajectories
            ]
            for group in store.groups(stage="rl")
        ]
        weights = {entry.name: entry.data["checksum"] for _, entry in store.entries("rl", kinds=["published"])}
        return msgspec.to_builtins(sampled), weights


@pytest.mark.kills
@pytest.mark.slow
def test_a_run_killed_thirty_times_in_mid_stream_is_one_that_nobody_killed(given: Path) -> None:
    """The run holds gateway, store and harness: all of them are killed at once, within a streamed reply."""
    chance, kills = random.Random(3), 0
    for name in ("alone", "killed"):
        code = -signal.SIGKILL
        while code:
            os.environ[KILL_AT] = str(chance.randrange(1, 20) if name == "killed" and kills < 30 else 0)
            try:
                with Forked(command(given, name), stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as run:
                    output, _ = run.communicate()
            finally:
                del os.environ[KILL_AT]
            code = run.returncode
            assert code in (0, -signal.SIGKILL), output
            kills += code != 0
    assert kills == 30
    folder = given.parent / "runs"
    assert outcome(folder / "killed") == outcome(folder / "alone")
