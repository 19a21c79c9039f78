"""ScienceWorld (Wang et al. 2022, arXiv 2203.07540): a house, played in text, in which things are found and compared.

The package `scienceworld` plays: a simulator in Scala, one process of Java each. Its tasks are rows that `tasks.py`
writes. What is earned is its own score, and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import os
import re
import shutil
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from threading import BoundedSemaphore
from typing import Any

from sparring.envs.base import Env, ToolError, tool
from sparring.errors import EnvError, refusal
from sparring.protocols import Expert
from sparring.types import Message, Observation, Score, Task, ToolCall, Trajectory

MOST = 8
"""Simulators of this process, each 0.2 to 0.4 GB: as many as `max_concurrent_rollouts` of the recipe."""

PATIENCE_S = 60.0
"""Seconds after which a call of the simulator has failed; one takes 0.2, and the first of a process a few."""

JAVA_OPTIONS = "-Xmx512m -XX:+UseSerialGC"
"""Without them each process takes up to a quarter of the machine's memory."""

EVERYWHERE = ("the agent", "air")
IDLE = re.compile(r" \(containing nothing\)| \(that is open\)|\. (On|In) the [^.:]+ is: nothing\.|a substance called ")
"""What a line of a list says without need."""


class ScienceWorld(Env):
    """One task of the game, worth its score when the rollout ends: 100 of 100 is a success.

    The score counts steps on the way. It is below 0 where the task is lost, which is worth 0, and in some tasks above 0
    before anything is done: a rollout without any action is worth 0 all the same.
    """

    simulator: Any = None
    acted = False

    def __init__(self, args: Any = None) -> None:
        check_installed()
        super().__init__(args)

    def key(self, task: Task) -> str:
        """Tasks that begin alike differ in what is elsewhere."""
        return str(task.data["id"])

    def check(self, task: Task) -> None:
        """Refuse a row that `tasks.py` has not written."""
        missing = [name for name in ("family", "variation", "simplifications") if name not in task.data]
        if missing:
            do = "write the rows with recipes/scienceworld/tasks.py"
            raise refusal(f"task {task.id}", "a task of ScienceWorld", f"none: no {', '.join(missing)}", do)

    async def open(self, task: Task, box: Any) -> Observation:
        """Begin the task in a simulator that nobody else has; it has to begin as its row says."""
        opened = await super().open(task, box)
        self.simulator = await SIMULATORS.take()
        data = task.data
        look = await patiently(self.simulator.begin, data["family"], data["variation"], data["simplifications"])
        if not data["prompt"].endswith(look):
            raise EnvError(f"task {task.id} begins otherwise than its row: {look}; write the rows again")
        return opened

    @tool
    async def act(self, action: str) -> str:
        """Do one thing in the house and read what happens.

        Args:
            action: look around, go to ROOM, focus on THING, pick up THING, move THING to THING
        """
        if self.simulator.over:
            raise ToolError("the task is over")
        self.acted = True
        return str(await patiently(self.simulator.act, action))

    async def step(self, reply: Message) -> Observation:
        """Go on until the task is solved or lost, or the model calls nothing."""
        seen = await super().step(reply)
        return replace(seen, done=True) if self.simulator.over else seen

    async def score(self, trajectory: Trajectory) -> Score:
        """Return the game's score."""
        reached = self.simulator.score if self.acted else 0
        return Score(reward=max(0, reached) / 100, success=reached == 100)

    async def close(self) -> None:
        """Give the simulator back."""
        simulator, self.simulator = self.simulator, None
        if simulator is not None:
            await SIMULATORS.give_back(simulator)

    def expert(self, task: Task) -> Expert | None:
        """Goes the way that the game itself knows; rows of evaluation have none."""
        if "gold" not in task.data:
            return None

        def reply(messages: Sequence[Message]) -> Message:
            done = sum(message.role == "tool" for message in messages)
            call = ToolCall(id=f"call_{done}", name="act", arguments={"action": task.data["gold"][done]})
            return Message(role="assistant", tool_calls=(call,))

        return reply


class Simulator:
    """One process of Java in which the game runs, for one task after another.

    Attributes:
        game: the package's own class.
        score: of the task so far, at most 100; below 0 where it is lost.
        over: whether the task is solved or lost.
        usable: False while a call is under way, and for good after one that was not answered.
    """

    def __init__(self) -> None:
        from scienceworld import ScienceWorldEnv  # not before somebody plays: the refusals do without

        logging.getLogger("py4j").setLevel(logging.CRITICAL)  # it reports each try to reach a process that died
        os.environ.setdefault("JAVA_TOOL_OPTIONS", JAVA_OPTIONS)
        self.game = ScienceWorldEnv()
        self.score, self.over, self.usable = 0, False, True

    def begin(self, family: str, variation: int, simplifications: str, *, gold: bool = False) -> str:
        """Begin a task; return the first look, `brief`.

        Args:
            family: a task's name in the game.
            variation: its number.
            simplifications: the game's own, such as "easy".
            gold: whether `game.get_gold_action_sequence` is wanted.
        """
        self.usable = False
        self.game.load(family, variation, simplifications, generateGoldPath=gold)
        self.game.server.reset()
        return self.act("look around")

    def act(self, action: str) -> str:
        """Do something; return what happens, `brief`."""
        self.usable = False
        happened = self.game.server.step(action.encode(errors="replace").decode())
        self.score = round(100 * self.game.server.getScore())
        self.over = self.game.server.getCompleted() or self.score < 0
        self.usable = True
        return brief(happened)

    def close(self) -> None:
        """End the process, however it is."""
        with contextlib.suppress(OSError):
            self.game.close()


class Simulators:
    """Pool of simulators, begun when they are needed. They end with this process, however that ends: each of them reads
    from a pipe until that is closed.

    Args:
        most: simulators that are in use at once.
    """

    def __init__(self, most: int) -> None:
        self._places = BoundedSemaphore(most)
        self._idle: deque[Simulator] = deque()

    async def take(self) -> Simulator:
        """Return a simulator that nobody else has. Waits for one where all are taken."""
        while not self._places.acquire(blocking=False):
            await asyncio.sleep(0.05)  # each rollout has an event loop of its own: none can wake another
        try:
            with contextlib.suppress(IndexError):
                return self._idle.pop()
            made: Simulator = await patiently(Simulator)
            return made
        except BaseException:
            self._places.release()
            raise

    async def give_back(self, simulator: Simulator) -> None:
        """Take a simulator back; one that did not answer is ended, and another begun in its place when it is needed."""
        if simulator.usable:
            self._idle.append(simulator)
        self._places.release()
        if not simulator.usable:
            await patiently(simulator.close)


SIMULATORS = Simulators(MOST)


async def patiently(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call what waits for Java, at most `PATIENCE_S` seconds.

    Raises:
        TimeoutError: it was not answered.
    """
    return await asyncio.wait_for(asyncio.to_thread(function, *arguments), PATIENCE_S)


def brief(text: str) -> str:
    """Return what the game says in one line: without what is everywhere and what is empty or open. What is listed is
    sorted, since the game's own order is another each time.

        This room is called the hallway. In it, you see:
                the agent
                a chair. On the chair is: nothing.
                a substance called air
        You also see:
                A door to the kitchen (that is open)

        This room is called the hallway. In it, you see: a chair. You also see: A door to the kitchen.
    """
    parts: list[str] = []
    listed: list[str] = []
    for line in [*text.strip().splitlines(), ""]:
        if line.startswith("\t"):
            listed.append(IDLE.sub("", line).strip(" .\t"))
            continue
        if listed:
            parts.append("; ".join(sorted(line for line in listed if line not in EVERYWHERE)) + ".")
            listed = []
        parts.append(line.strip())
    return " ".join(part for part in parts if part)


def check_installed(package: str = "scienceworld", program: str = "java") -> None:
    """Refuse a machine that cannot play.

    Raises:
        BadInput: the package or Java is not there.
    """
    where = "recipes/scienceworld"
    if importlib.util.find_spec(package) is None:
        do = "pip install scienceworld==1.2.3"
        raise refusal(where, f"the package {package} in the interpreter that runs sparring", "none", do)
    if shutil.which(program) is None:
        do = "install a Java runtime, 8 or newer, such as default-jre-headless of Debian"
        raise refusal(where, f"a program {program} on PATH, in which ScienceWorld runs", "none", do)
