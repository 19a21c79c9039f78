"""The chat loop and any Python callable, on the toy world."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sparring.errors import EnvError, LimitReached
from sparring.generation import Constraint
from sparring.harness.callable import CallableHarness
from sparring.harness.chat import ChatHarness
from sparring.harness.episode import LiveEpisode
from sparring.protocols import Episode
from sparring.record.recorder import RecordedSession, Recorder
from sparring.testing.clock import run_virtual
from sparring.testing.scripted_engine import ScriptedEngine, replies
from sparring.testing.toy import ToyEnv, toy_renderer, toy_script, toy_task
from sparring.types import Limits, Message, Observation, Outcome, Task

RENDERER = toy_renderer()


def episode(
    engine: ScriptedEngine, env: ToyEnv | None = None, task: Task | None = None
) -> LiveEpisode[RecordedSession]:
    """A rollout of the toy world on this engine."""
    recorder = Recorder(engine, RENDERER)
    task = task or toy_task(3)
    return LiveEpisode(task, env or ToyEnv(), None, lambda role: recorder.open(task, rollout_id="r", seed=1, role=role))


def test_a_chat_runs_to_the_answer_and_scores():
    live = episode(ScriptedEngine(toy_script(RENDERER)))

    async def run() -> float | None:
        await ChatHarness().run(live)
        trajectory = live.session().trajectory(Outcome(kind="completed", reason="answered"))
        assert [s.source for s in trajectory.segments] == ["prompt", "policy", "tool", "policy"]
        score = await live.env.score(trajectory)
        return score.reward if score else None

    assert run_virtual(run())[0] == 1.0


def test_limits_end_a_chat():
    task = toy_task(3, limits=Limits(max_turns=1))
    with pytest.raises(LimitReached, match="1 turns are used up"):
        run_virtual(ChatHarness().run(episode(ScriptedEngine(toy_script(RENDERER)), task=task)))


class BrokenEnv(ToyEnv):
    """Breaks at its first step."""

    async def step(self, reply: Message) -> Observation:
        """Raise."""
        raise KeyError("missing")


class SilentEnv(ToyEnv):
    """Says nothing and never ends."""

    async def step(self, reply: Message) -> Observation:
        """Nothing."""
        return Observation()


def test_a_broken_world_is_the_worlds_failure():
    engine = ScriptedEngine(replies(["Hi"], RENDERER.tokenizer.encode))
    with pytest.raises(EnvError, match="environment toy, task train-3: step: KeyError"):
        run_virtual(ChatHarness().run(episode(engine, BrokenEnv())))
    with pytest.raises(EnvError, match="nothing was said"):
        run_virtual(ChatHarness().run(episode(engine, SilentEnv())))


def test_a_callable_holds_several_conversations():
    engine = ScriptedEngine(replies(["Hi", "No"], RENDERER.tokenizer.encode))
    live = episode(engine)

    async def debate(episode: Episode) -> None:
        one = await episode.session().complete(episode.task.messages)
        await episode.session("critic").complete([Message(role="user", content=one.content)])

    run_virtual(CallableHarness(debate).run(live))
    assert list(live.sessions) == ["policy", "critic"]
    assert [s.segments[-1].message.content for s in live.sessions.values()] == ["Hi", "No"]
    assert live.session("critic") is live.sessions["critic"]


def test_a_callable_that_breaks_is_typed_and_limits_pass_through():
    async def broken(episode: Episode) -> None:
        raise ZeroDivisionError

    with pytest.raises(EnvError, match="harness .*broken: ZeroDivisionError"):
        run_virtual(CallableHarness(broken).run(episode(ScriptedEngine(lambda r: ()))))

    async def greedy(episode: Episode) -> None:
        while True:
            await episode.session().complete(episode.task.messages)

    with pytest.raises(LimitReached):
        run_virtual(CallableHarness(greedy).run(episode(ScriptedEngine(replies(["Hi"], RENDERER.tokenizer.encode)))))


class AskingEnv(ToyEnv):
    """Says what a reply must be: anything at first, then what `source` says."""

    source = "The answer is [0-9]+."

    async def step(self, reply: Message) -> Observation:
        """The tool's answer, and what is to be said behind it."""
        observation = await super().step(reply)
        return replace(observation, constraint=Constraint(kind="regex", source=self.source))


def test_a_world_says_what_the_next_reply_must_be():
    engine = ScriptedEngine(toy_script(RENDERER))
    live = episode(engine, AskingEnv())
    run_virtual(ChatHarness().run(live))
    assert [s.sampling.constraint for s in live.session().segments if s.sampling] == [
        None,
        Constraint(kind="regex", source=AskingEnv.source),
    ]
    assert [request.allowed is None for request in engine.requests] == [True, False]


def test_a_world_that_asks_for_what_does_not_compile_has_failed():
    env = AskingEnv()
    env.source = "("
    with pytest.raises(EnvError, match="task train-3: constraint: "):
        run_virtual(ChatHarness().run(episode(ScriptedEngine(toy_script(RENDERER)), env)))
