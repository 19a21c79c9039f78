"""Guests: real processes with worlds of their own; every fault of theirs is a typed failure, never a reward."""

import asyncio
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sparring.envs.guests.pool import GuestConfig, Guests
from sparring.envs.guests.process import GuestFailed
from sparring.envs.guests.world import GuestWorld
from sparring.errors import BadInput, EnvError
from sparring.types import Message, Task, ToolCall

COUNTER = """
import os, sys, time

SUCCESS_AT = 2


class World:
    def __init__(self, goal=2):
        self.goal = goal

    def reset(self, seed, start=0):
        self.at = start
        return {"observation": f"at {self.at} of {seed}", "state_key": str(self.at)}

    def step(self, action):
        return FAULTS[action["text"]](self) if action["text"] in FAULTS else self.on()

    def on(self):
        self.at += 1
        return {"observation": {"text": f"at {self.at}"}, "reward": 1.0, "done": self.at >= self.goal}


FAULTS = {
    "raise": lambda world: world.missing,
    "exit": lambda world: sys.exit(3),
    "die": lambda world: os.kill(os.getpid(), 9),
    "print": lambda world: print("told") or world.on(),
    "print and die": lambda world: print("last words", flush=True) or os.kill(os.getpid(), 9),
    "nan": lambda world: {"reward": float("nan")},
    "text": lambda world: {"reward": "illegal move"},
    "no answer": lambda world: 7,
    "object": lambda world: {"observation": object()},
    "huge": lambda world: {"observation": "x" * (1 << 25)},
    "broke": lambda world: {"failure": "the board fell down"},
    "fork": lambda world: (os.fork() or os._exit(0)) and world.on(),
    "hang": lambda world: time.sleep(1000),
}
"""

GAME = """
def roles(players=2):
    return ("first", "second")[:players]

class World:
    def __init__(self, players=2):
        self.said = []

    def reset(self, seed):
        return {"observation": "begin", "role": "second"}

    def step(self, action):
        self.said.append((action["role"], action["text"]))
        return {"observation": action["text"], "role": "first", "done": len(self.said) == 2, "reward": len(self.said)}
"""

TOOLS = """
class World:
    def reset(self, seed):
        return {"observation": "use it"}

    def tools(self):
        return [{"name": "double", "description": "", "parameters": {"type": "object"}}]

    def call(self, name, arguments):
        return {"observation": str(2 * arguments["x"]), "reward": 1.0, "done": True}
"""

TASK = Task(id="w/train/0", env="w", messages=(), data={"seed": 5}, seed=5)

Start = Callable[..., Guests]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    def guests(adapter: str, **settings: Any) -> Guests:
        path = tmp_path / "world_of_others.py"
        path.write_text(adapter)
        return Guests(GuestConfig(command=str(path), python=sys.executable, **settings))

    return guests


def reply(text: str) -> Message:
    return Message(role="assistant", content=text)


def ended(pid: int) -> bool:
    """Wait until a process has ended."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    return bool(select.select([handle], [], [], 30)[0])


@pytest.mark.parametrize("constants", ["", "REENTRANT = True", "FORKS = False"])
def test_a_world_is_played_and_scored(start: Start, constants: str) -> None:
    guests = start(COUNTER + constants)

    async def play() -> None:
        worlds = [GuestWorld(guests, ("policy",), {"goal": 2 + n}) for n in range(3)]
        openings = await asyncio.gather(*(world.open(TASK, None) for world in worlds))
        for n, (world, opened) in enumerate(zip(worlds, openings, strict=True)):
            assert opened.messages[0].content == "at 0 of 5" and opened.state_key == "0" and not opened.done
            assert (await world.step(reply("print"))).messages[0].content == "at 1"
            assert (await world.step(reply("fork"))).done == (n == 0)
        scores = [await world.score_all({}) for world in worlds]
        assert [(score.reward, score.success) for score in scores if score] == [(2.0, True)] * 3
        for world in worlds:
            await world.close()

    asyncio.run(play())
    asyncio.run(play())  # another event loop


@pytest.mark.parametrize(
    ("fault", "error", "said"),
    [
        ("raise", EnvError, "AttributeError: 'World' object has no attribute 'missing'"),
        ("exit", EnvError, "SystemExit: 3"),
        ("die", GuestFailed, "it died"),
        ("print and die", GuestFailed, "last words"),
        ("nan", GuestFailed, "what is no answer"),
        ("text", EnvError, "expected a finite number as reward, got 'illegal move'"),
        ("no answer", EnvError, "expected an answer of a world"),
        ("object", EnvError, "not JSON serializable"),
        ("huge", EnvError, "at most 16777216 bytes"),
        ("broke", EnvError, "the board fell down"),
    ],
)
def test_a_fault_is_a_typed_failure(start: Start, fault: str, error: type[Exception], said: str) -> None:
    async def play() -> None:
        world = GuestWorld(start(COUNTER), ("policy",), {})
        await world.open(TASK, None)
        with pytest.raises(error, match=said):
            await world.step(reply(fault))
        await world.close()

    asyncio.run(play())


def test_a_call_that_is_given_up_ends_its_guest_alone(start: Start) -> None:
    async def play() -> None:
        guests = start(COUNTER)
        stuck, other = GuestWorld(guests, ("policy",), {}), GuestWorld(guests, ("policy",), {})
        await stuck.open(TASK, None)
        await other.open(TASK, None)
        guest = stuck._guest
        assert guest is not None
        step = asyncio.ensure_future(stuck.step(reply("hang")))
        await other.step(reply(""))
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step
        assert ended(guest.pid)
        assert (await other.step(reply(""))).done
        await stuck.close()
        await other.close()

    asyncio.run(play())


def test_nothing_is_left_when_the_run_is_killed(start: Start, tmp_path: Path) -> None:
    start(COUNTER)
    program = f"""
import asyncio, os, sys
from sparring.envs.guests.pool import GuestConfig, Guests
async def main():
    guests = Guests(GuestConfig(command={str(tmp_path / "world_of_others.py")!r}, python=sys.executable))
    taken = [await guests.take(n) for n in range(3)]
    print(*[guest.pid for guest in taken], guests._keeper._process.pid, flush=True)
    sys.stdin.read()
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as run:
        assert run.stdout is not None
        pids = [int(pid) for pid in run.stdout.readline().split()]
        run.send_signal(signal.SIGKILL)
    assert len(pids) == 4 and all(ended(pid) for pid in pids)


def test_roles_have_rewards_of_their_own(start: Start) -> None:
    async def play() -> None:
        guests = start(GAME)
        roles = guests.roles_with({"players": 2})
        world = GuestWorld(guests, roles, {"players": 2})
        assert (await world.open(TASK, None)).role == "second"
        assert (await world.step_of("second", reply("a"))).role == "first"
        assert (await world.step_of("first", reply("b"))).done
        score = await world.score_all({})
        assert score is not None and score.per_role == {"first": 2.0, "second": 1.0} and score.reward == 1.5
        await world.close()

    asyncio.run(play())


def test_tools_are_called_by_name(start: Start) -> None:
    async def play() -> None:
        world = GuestWorld(start(TOOLS), ("policy",), {})
        await world.open(TASK, None)
        assert [tool.name for tool in world.tools] == ["double"]
        calls = [("halve", {}), ("double", None), ("double", {"x": 4})]
        made = tuple(ToolCall(id=str(n), name=name, arguments=given) for n, (name, given) in enumerate(calls))
        seen = await world.step(Message(role="assistant", content="", tool_calls=made))
        texts = [message.content for message in seen.messages]
        assert texts[0].startswith("error: no tool 'halve'") and "JSON object" in texts[1] and texts[2] == "8"
        assert seen.done and [message.tool_call_id for message in seen.messages] == ["0", "1", "2"]
        await world.close()

    asyncio.run(play())


def test_a_guest_gets_no_variable_of_the_run(start: Start) -> None:
    guests = start("import os\ndef tasks(): return [dict(os.environ)]\n", variables={"GIVEN": "yes"})
    (variables,) = guests.ask("tasks", {})
    assert "PYTEST_CURRENT_TEST" in os.environ and "PYTEST_CURRENT_TEST" not in variables
    assert variables["GIVEN"] == "yes"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"command": "chess960", "python": sys.executable}, "one of gymnasium, textarena, or path/to/file.py"),
        ({"command": "gymnasium", "python": "/no/such/python"}, "the path of an interpreter"),
        ({"command": "gymnasium", "python": "nowhere"}, "the path of an interpreter"),
    ],
)
def test_what_cannot_start_is_refused(settings: dict[str, str], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        Guests(GuestConfig(**settings))


def test_a_missing_package_is_told(start: Start) -> None:
    with pytest.raises(GuestFailed, match="No module named 'no_such_ecosystem'"):
        start("import no_such_ecosystem\n").ask("tasks", {})
