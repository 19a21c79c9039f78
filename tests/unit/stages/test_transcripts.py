"""Conversations are remembered until they are asked for, whatever became of the attempts at them."""

import gc
import weakref

import pytest

from sparring.errors import ToolHostError
from sparring.harness.chat import ChatHarness
from sparring.record.recorder import Recorder
from sparring.rollout.config import RolloutConfig
from sparring.rollout.episode import RecordingSession
from sparring.rollout.runner import Finished, RolloutRunner
from sparring.sandbox.bubblewrap import BubblewrapBoxes
from sparring.sandbox.config import SandboxConfig
from sparring.stages.data.transcripts import TranscriptRecorder
from sparring.testing.clock import run_virtual
from sparring.testing.scripted_engine import ScriptedEngine
from sparring.testing.toy import ToyEnv, ToyWorld, toy_renderer, toy_script, toy_task
from sparring.types import Score, Task, Trajectory


class Breaking(ToyWorld):
    """Toy worlds, of which the first few break when they are to score what was said."""

    def __init__(self, count: int) -> None:
        self.left = count

    def make(self) -> ToyEnv:
        """A world that knows whether it breaks."""
        self.left -= 1
        return BreaksAtTheEnd() if self.left >= 0 else ToyEnv()


class BreaksAtTheEnd(ToyEnv):
    """Scores nothing."""

    async def score(self, trajectory: Trajectory) -> Score | None:
        """As a host that is gone."""
        raise ToolHostError(f"tools: gone after {trajectory.id}")


class Seen:
    """A recorder whose sessions are known as long as anybody holds them."""

    def __init__(self) -> None:
        engine = ScriptedEngine(toy_script(toy_renderer()), latency_s=1.0)
        self._recorder = Recorder(engine, toy_renderer(), sampling=RolloutConfig().sampling())
        self.held: weakref.WeakSet[RecordingSession] = weakref.WeakSet()
        self.opened = 0

    def open(self, task: Task, *, rollout_id: str, seed: int, role: str, priority: int) -> RecordingSession:
        """One of the recorder's."""
        session = self._recorder.open(task, rollout_id=rollout_id, seed=seed, role=role, priority=priority)
        self.held.add(session)
        self.opened += 1
        return session


@pytest.mark.parametrize("breaks", [0, 1, 2, 9])
def test_of_attempts_that_broke_nothing_is_kept(breaks: int) -> None:
    seen = Seen()
    transcripts = TranscriptRecorder(seen)
    config = RolloutConfig(retries=2)
    runner = RolloutRunner(Breaking(breaks), BubblewrapBoxes(SandboxConfig()), transcripts, ChatHarness(), config)

    async def done() -> Finished:
        return await runner.run(toy_task(), rollout_id="collect/0/0", index=0, seed=1)

    finished, _ = run_virtual(done())
    assert seen.opened == len(seen.held) == min(breaks, 2) + 1
    assert (finished.score is None) == (breaks == 9) and len(finished.broken) == min(breaks, 2)
    said = transcripts.conversation(finished)
    assert [message.role for message in said] == ["user", "assistant", "tool", "assistant"]
    gc.collect()
    assert not seen.held
