"""The toy stack with a world and boxes that break on demand."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tables import with_settings

from sparring.errors import SandboxError
from sparring.harness.chat import ChatHarness
from sparring.protocols import Sandbox
from sparring.record.recorder import Recorder
from sparring.rollout.config import RolloutConfig
from sparring.rollout.runner import Finished, RolloutRunner
from sparring.store.sqlite import SqliteStore
from sparring.testing.clock import run_virtual
from sparring.testing.scripted_engine import ScriptedEngine
from sparring.testing.toy import ToyEnv, ToyWorld, toy_renderer, toy_script
from sparring.types import (
    MOST_BYTES,
    BoxSpec,
    EntryKind,
    ExecResult,
    Message,
    Observation,
    Score,
    Task,
    Trajectory,
)

Act = Callable[[int], BaseException | float | None]
"""What goes wrong at the n-th call (from 0) over all worlds: an exception to raise, or seconds to take."""


async def suffer(act: Act, number: int) -> None:
    """Let it go wrong."""
    fate = act(number)
    if isinstance(fate, BaseException):
        raise fate
    if fate is not None:
        await asyncio.sleep(fate)


@dataclass
class Fates:
    """What happens at which call, and how many calls and worlds there were."""

    open: Act = lambda number: None
    step: Act = lambda number: None
    score: Act = lambda number: None
    close: Act = lambda number: None
    take: Act = lambda number: None
    calls: dict[str, int] = field(default_factory=dict)
    open_worlds: int = 0
    open_boxes: int = 0

    async def meet(self, name: str) -> None:
        """The next call of that name."""
        number = self.calls.get(name, 0)
        self.calls[name] = number + 1
        await suffer(getattr(self, name), number)


class FatedEnv(ToyEnv):
    """The toy world under fates."""

    def __init__(self, fates: Fates) -> None:
        super().__init__()
        self._fates = fates
        self._opened = 0

    async def open(self, task: Task, box: Sandbox | None) -> Observation:
        self._opened = 1
        self._fates.open_worlds += 1
        await self._fates.meet("open")
        return await super().open(task, box)

    async def step(self, reply: Message) -> Observation:
        await self._fates.meet("step")
        return await super().step(reply)

    async def score(self, trajectory: Trajectory) -> Score | None:
        await self._fates.meet("score")
        return await super().score(trajectory)

    async def close(self) -> None:
        self._fates.open_worlds -= self._opened
        await self._fates.meet("close")
        await super().close()


class FatedWorld(ToyWorld):
    """Makes fated toy worlds."""

    def __init__(self, fates: Fates) -> None:
        self._fates = fates

    def make(self) -> FatedEnv:
        return FatedEnv(self._fates)


class EmptyBox:
    """A box that can only be closed."""

    def __init__(self, fates: Fates) -> None:
        self._fates = fates

    async def exec(self, argv: Sequence[str], *, stdin: str = "", timeout_s: float | None = None) -> ExecResult:
        raise SandboxError("nothing runs here")

    async def python(self, code: str, *, timeout_s: float | None = None) -> ExecResult:
        raise SandboxError("nothing runs here")

    async def fresh(self) -> EmptyBox:
        raise SandboxError("nothing runs here")

    async def converse(self, code: str, other: str) -> ExecResult:
        raise SandboxError("nothing runs here")

    async def read(self, path: str, most_bytes: int = MOST_BYTES) -> bytes:
        raise SandboxError("nothing is here")

    async def entries(self, path: str = ".") -> Mapping[str, EntryKind]:
        raise SandboxError("nothing is here")

    async def write(self, path: str, data: bytes) -> None:
        raise SandboxError("nothing can be here")

    async def close(self) -> None:
        self._fates.open_boxes -= 1


class FatedBoxes:
    """A pool under fates."""

    def __init__(self, fates: Fates) -> None:
        self._fates = fates

    async def take(self, spec: BoxSpec) -> EmptyBox:
        await self._fates.meet("take")
        self._fates.open_boxes += 1
        return EmptyBox(self._fates)

    async def close(self) -> None:
        pass


@dataclass
class Stack:
    """A runner on the toy stack with its parts at hand."""

    fates: Fates
    config: RolloutConfig
    engine: ScriptedEngine
    recorder: Recorder
    runner: RolloutRunner

    def run(self, task: Task) -> Finished:
        """One rollout on a virtual clock."""
        return run_virtual(self.runner.run(task, rollout_id="rl/0/0", index=0, seed=1))[0]


def make_stack(
    fates: Fates | None = None,
    *,
    engine: ScriptedEngine | None = None,
    store: SqliteStore | None = None,
    **config: object,
) -> Stack:
    """The toy stack with settings of `[rollout]`."""
    fates = fates or Fates()
    settings = with_settings(RolloutConfig(), **config)
    engine = engine or ScriptedEngine(toy_script(toy_renderer()), latency_s=1.0)
    recorder = Recorder(engine, toy_renderer(), store, sampling=settings.sampling.build())
    runner = RolloutRunner(FatedWorld(fates), FatedBoxes(fates), recorder, ChatHarness(), settings)
    return Stack(fates, settings, engine, recorder, runner)
