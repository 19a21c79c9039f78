"""Rollouts of policies that spoil their box, in the real loop: they keep their bad score, and none is tried again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from sparring.envs.base import Env
from sparring.envs.tools.python import PythonTool
from sparring.generation import GenerateRequest
from sparring.harness.chat import ChatHarness
from sparring.record.recorder import Recorder
from sparring.render.demonstrate import reply_tokens
from sparring.rollout.config import RewardsConfig, RolloutConfig
from sparring.rollout.runner import Finished, RolloutRunner
from sparring.sandbox.bubblewrap import BubblewrapBoxes
from sparring.sandbox.config import SandboxConfig
from sparring.testing.scripted_engine import ScriptedEngine
from sparring.testing.toy import ToyWorld, toy_renderer, toy_task
from sparring.types import BoxSpec, Message, Score, Task, ToolCall, Trajectory


class Answer(PythonTool, Env):
    """A wrong answer is worth -1, whatever became of the box."""

    def reward(self, completion: str, task: Task) -> float:
        return -1.0


class Written(Answer):
    """Judged by a file that the policy was to write, in a world that expects no obstacle."""

    async def open(self, task: Task, box: Any) -> Any:
        opened = await super().open(task, box)
        await box.snapshot()
        return opened

    async def score(self, trajectory: Trajectory) -> Score:
        assert self.box is not None
        return Score(reward=float(await self.box.read("answer") == b"42"))


class Verified(Written):
    """Judged in a verifier, which is not told what to expect either."""

    async def score(self, trajectory: Trajectory) -> Score:
        assert self.box is not None
        verifier = await self.box.verifier(["answer", "notes"])
        return Score(reward=float(await verifier.read("answer") == b"42"))


class Carried(Written):
    """Judged in a fresh box, to which the whole tree is carried."""

    async def score(self, trajectory: Trajectory) -> Score:
        assert self.box is not None
        fresh = await self.box.fresh()
        await fresh.upload(await self.box.download())
        return Score(reward=float((await fresh.exec("cat answer")).stdout == "42"))


class Asked(Written):
    """Judged by a service that the policy was to start."""

    async def score(self, trajectory: Trajectory) -> Score:
        assert self.box is not None
        with await self.box.connect(8000) as link:
            return Score(reward=float(link.recv(2) == b"42"))


class Made(ToyWorld):
    """Makes worlds of a class."""

    def __init__(self, kind: type[Env]) -> None:
        self.make = kind  # type: ignore[assignment]


@pytest.fixture(scope="module")
def pool() -> Iterator[tuple[asyncio.Runner, BubblewrapBoxes]]:
    with asyncio.Runner() as runner:
        boxes = BubblewrapBoxes(SandboxConfig(servers=1))
        yield runner, boxes
        runner.run(boxes.close())


def played(pool: tuple[asyncio.Runner, BubblewrapBoxes], kind: type[Env], codes: tuple[str, ...]) -> Finished:
    """A rollout of a policy that runs these codes, one a turn, and then gives a wrong answer."""
    runner, boxes = pool
    renderer = toy_renderer()

    def script(request: GenerateRequest) -> tuple[int, ...]:
        turn = renderer.decode(request.tokens).count("<tool_response>")
        calls = [ToolCall(id="c", name="python", arguments={"code": code}) for code in codes[turn : turn + 1]]
        reply = Message(role="assistant", content="" if calls else "41", tool_calls=tuple(calls))
        return reply_tokens(renderer, reply, kind().tools)

    config = RolloutConfig(rewards=RewardsConfig(policy_failure=-2.0))
    recorder = Recorder(ScriptedEngine(script), renderer, max_context=4000, sampling=config.sampling.build())
    task = replace(toy_task(), box=BoxSpec(timeout_s=5.0))
    rollouts = RolloutRunner(Made(kind), boxes, recorder, ChatHarness(), config)  # type: ignore[arg-type]
    return runner.run(rollouts.run(task, rollout_id="rl/0/0", index=0, seed=1))


CLOSE = "import os; os.chmod('/box', 0)"
POLICIES = {
    "closes its folder": (Answer, (CLOSE, "print(1)"), "completed", -1.0),
    "does nothing": (Written, (), "policy_failed", -2.0),
    "closes what is read": (Written, (CLOSE,), "policy_failed", -2.0),
    "writes too much": (
        Verified,
        ("import os\nfor name in ('answer', 'notes'): os.truncate(os.open(name, os.O_CREAT | os.O_RDWR), 10 << 20)",),
        "policy_failed",
        -2.0,
    ),
    "leaves a pipe": (Carried, ("import os; os.mkfifo('pipe')",), "policy_failed", -2.0),
    "serves nothing": (Asked, ("1",), "policy_failed", -2.0),
}


@pytest.mark.parametrize("what", POLICIES)
def test_a_policy_that_spoils_its_box_keeps_its_score(pool: Any, what: str) -> None:
    kind, codes, ends, reward = POLICIES[what]
    done = played(pool, kind, codes)
    assert (done.rollout.outcome.kind, done.score and done.score.reward) == (ends, reward)
    assert done.rollout.attempt == 0 and not done.broken
