"""Long conversations on the loaded engine: a world that goes on for some turns, each with a tool that takes a while."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import xxhash
from loaded_engine import LoadedEngine

from sparring.generation import GenerateRequest
from sparring.harness.chat import ChatHarness
from sparring.record.recorder import Recorder
from sparring.rollout.config import RolloutConfig
from sparring.rollout.load import Places
from sparring.rollout.runner import RolloutRunner
from sparring.rollout.scheduler import Scheduler
from sparring.rollout.window import Window
from sparring.sandbox.bubblewrap import BubblewrapBoxes
from sparring.sandbox.config import SandboxConfig
from sparring.testing.clock import run_virtual
from sparring.testing.toy import ToyEnv, ToyWorld, toy_renderer
from sparring.types import Group, Message, Observation, Score, Trajectory

TURNS = 6
GROUP_SIZE = 4


def words(request: GenerateRequest) -> tuple[int, ...]:
    """From 12 to 36 tokens, by the seed and the turn."""
    return (20,) * (12 + xxhash.xxh3_64_intdigest(f"{request.sampling.seed}/{len(request.tokens)}".encode()) % 25)


class Talk(ToyEnv):
    """A conversation of `TURNS` turns; a tool takes from 0 to 2 seconds."""

    tools = ()

    def __init__(self) -> None:
        super().__init__()
        self._turns = 0

    async def step(self, reply: Message) -> Observation:
        """Say a few words more."""
        assert self._task is not None
        self._turns += 1
        drawn = xxhash.xxh3_64_intdigest(f"{self._task.id}/{self._turns}/{len(reply.content)}".encode())
        await asyncio.sleep(drawn % 100 / 50)
        more = Message(role="user", content="What is 12 + 34? " * (1 + drawn % 3))
        return Observation(done=self._turns == TURNS, messages=() if self._turns == TURNS else (more,))

    async def score(self, trajectory: Trajectory) -> Score | None:
        """All are right."""
        return Score(reward=1.0, success=True)


class Talks(ToyWorld):
    """Makes conversations."""

    def make(self) -> Talk:
        """A fresh one."""
        return Talk()


class Training:
    """A training whose groups are sampled on a loaded engine, and nothing else: of one endless step, or of some."""

    def __init__(
        self, engine: LoadedEngine, *, most: int, follows: bool, groups: int = 1000, max_lag: int = 0, steps: int = 1
    ) -> None:
        config = RolloutConfig(group_size=GROUP_SIZE, max_concurrent_rollouts=most, max_lag=max_lag)
        self.engine, self.world = engine, Talks()
        recorder = Recorder(engine, toy_renderer(), sampling=config.sampling.build())
        boxes = BubblewrapBoxes(SandboxConfig(enabled=False))
        self.runner = RolloutRunner(self.world, boxes, recorder, ChatHarness(), config)
        if follows:
            self.runner.places = Places(most, lambda: engine.metrics)
        self.window = Window(groups, max_lag, steps)
        self.scheduler = Scheduler(
            self.runner, self.world.tasks("train", 0), self.window, run_seed=5, engine_version=lambda: engine.version
        )

    async def sample(self, until: Callable[[list[Group]], bool]) -> list[Group]:
        """Sample groups until there are enough."""
        groups: list[Group] = []
        async for group in self.scheduler.groups():
            groups.append(group)
            if until(groups):
                break
        await self.scheduler.close()
        return groups


def sampled(training: Training, groups: int) -> tuple[list[Group], float]:
    """The first groups of a training, and the seconds of a rollout."""
    made, seconds = run_virtual(training.sample(lambda made: len(made) == groups))
    return made, seconds / (groups * GROUP_SIZE)
