"""The chat loop and any Python callable, on the toy world."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from refusals import refused_at

from sparring.errors import BadInput, EnvError, LimitReached
from sparring.generation import Constraint
from sparring.harness.chat import ChatHarness
from sparring.harness.load import CallableHarness, load_harness
from sparring.protocols import Episode, Harness
from sparring.record.recorder import Recorder
from sparring.rollout.episode import ANSWERED, RunningEpisode
from sparring.rollout.guarded_env import GuardedEnv
from sparring.testing.clock import run_virtual
from sparring.testing.scripted_engine import ScriptedEngine, replies
from sparring.testing.toy import ToyEnv, toy_renderer, toy_script, toy_task
from sparring.types import Limits, Message, Observation, Task, Timing, Trajectory

RENDERER = toy_renderer()


def episode(engine: ScriptedEngine, env: ToyEnv | None = None, task: Task | None = None) -> RunningEpisode:
    """A rollout of the toy world on this engine."""
    world = GuardedEnv(lambda: env or ToyEnv())
    return RunningEpisode(task or toy_task(3), world, Recorder(engine, RENDERER), rollout_id="r", seed=1)


def trajectories(live: RunningEpisode) -> dict[str, Trajectory]:
    """Its record by role, as if nothing had gone wrong."""
    return {trajectory.role: trajectory for trajectory in live.trajectories(ANSWERED, Timing())}


def test_a_chat_runs_to_the_answer_and_scores():
    live = episode(ScriptedEngine(toy_script(RENDERER)))

    async def run() -> float | None:
        await ChatHarness().run(live)
        trajectory = trajectories(live)["policy"]
        assert [s.source for s in trajectory.segments] == ["prompt", "policy", "tool", "policy"]
        score = await live.env.score([trajectory])
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
    with pytest.raises(EnvError, match="env.step: KeyError"):
        run_virtual(ChatHarness().run(episode(engine, BrokenEnv())))
    with pytest.raises(EnvError, match="a message to reply to"):
        run_virtual(ChatHarness().run(episode(engine, SilentEnv())))


class DebateEnv(ToyEnv):
    """Two speak."""

    roles = ("policy", "critic")


def test_a_callable_holds_several_conversations():
    engine = ScriptedEngine(replies(["Hi", "No"], RENDERER.tokenizer.encode))
    live = episode(engine, DebateEnv())

    async def debate(episode: Episode) -> None:
        first = await episode.session("policy").complete(episode.task.messages)
        await episode.session("critic").complete([Message(role="user", content=first.content)])

    run_virtual(CallableHarness(debate).run(live))
    assert [t.segments[-1].message.content for t in trajectories(live).values()] == ["Hi", "No"]
    assert [t.id for t in trajectories(live).values()] == ["r", "r/critic"]
    assert live.session("critic") is live.session("critic")


class TurnsEnv(DebateEnv):
    """The critic speaks first, then twice the policy; the world names a stranger if `then` does."""

    then = "policy"

    async def open(self, task: Task, box: object) -> Observation:
        """Ask the critic."""
        self.said: list[str] = []
        return Observation(messages=(Message(role="user", content="Begin."),), role="critic")

    async def step_of(self, role: str, reply: Message) -> Observation:
        """Hand each reply to the policy, until it has spoken twice."""
        self.said.append(f"{role}: {reply.content}")
        heard = Message(role="user", content=reply.content)
        return Observation(messages=(heard,), role=self.then, done=len(self.said) == 3)


def test_a_chat_plays_the_role_that_the_world_names():
    env = TurnsEnv()
    live = episode(ScriptedEngine(replies(["Hi", "No", "Yes"], RENDERER.tokenizer.encode)), env)
    run_virtual(ChatHarness().run(live))
    assert env.said == ["critic: Hi", "policy: No", "policy: Yes"]
    texts = {r: [s.message.content for s in t.segments if s.message] for r, t in trajectories(live).items()}
    assert texts["critic"] == ["Begin.", "Hi"]
    assert texts["policy"] == ["Hi", "No", "No", "Yes"]
    for stranger in ("judge", None):
        env.then = stranger
        again = episode(ScriptedEngine(replies(["Hi"], RENDERER.tokenizer.encode)), env)
        with pytest.raises(BadInput, match=f"Observation.role: expected .* one of policy, critic, got {stranger!r}"):
            run_virtual(ChatHarness().run(again))


def test_an_error_of_a_callable_is_typed_and_limits_pass_through():
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


def test_a_world_constrains_the_next_reply():
    engine = ScriptedEngine(toy_script(RENDERER))
    live = episode(engine, AskingEnv())
    asyncio.run(ChatHarness().run(live))  # no virtual clock: a grammar is compiled in a thread
    assert [s.sampling.constraint for s in trajectories(live)["policy"].segments if s.sampling] == [
        None,
        Constraint(kind="regex", source=AskingEnv.source),
    ]
    assert [request.allowed is None for request in engine.requests] == [True, False]


def test_a_constraint_that_does_not_compile_is_the_worlds_failure():
    env = AskingEnv()
    env.source = "("
    with pytest.raises(EnvError, match="task train-3: constraint: "):
        asyncio.run(ChatHarness().run(episode(ScriptedEngine(toy_script(RENDERER)), env)))


HARNESSES = """
async def terse(episode):
    await episode.session().complete(episode.task.messages)

class Terse:
    def __init__(self):
        self.count = 0

    async def run(self, episode):
        await terse(episode)

class NeedsMore(Terse):
    def __init__(self, more):
        pass

class Silent:
    pass

def at_once(episode):
    pass

NUMBER = 3
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(HARNESSES)
    return str(tmp_path / "mine.py")


def recorded_sources(harness: Harness) -> list[str]:
    """The sources of what is recorded when it plays the toy world."""
    live = episode(ScriptedEngine(replies(["Hi"], RENDERER.tokenizer.encode)))
    run_virtual(harness.run(live))
    return [segment.source for segment in trajectories(live)["policy"].segments]


def test_a_recipe_names_its_harness(file: str):
    assert isinstance(load_harness("chat", ("policy",)), ChatHarness)
    for name in (f"{file}:terse", f"{file}:Terse"):
        assert recorded_sources(load_harness(name, ("policy",))) == ["prompt", "policy"]
    installed = load_harness("sparring.harness.chat:ChatHarness", ("policy",))
    live = episode(ScriptedEngine(toy_script(RENDERER)))
    run_virtual(installed.run(live))
    assert [s.source for s in trajectories(live)["policy"].segments] == ["prompt", "policy", "tool", "policy"]


@pytest.mark.parametrize(
    ("name", "noun"),
    [
        ("chess", "one of chat, claude-code"),
        ("{folder}/none.py:play", "a Python file {folder}/none.py"),
        ("no_such_package.at_all:play", "an installed module no_such_package.at_all"),
        ("{file}:play", "a name defined in {file}, got 'play'"),
        ("{file}:Silent", "got type {file}:Silent"),
        ("{file}:at_once", "got function {file}:at_once"),
        ("{file}:NUMBER", "got int {file}:NUMBER"),
        ("{file}:NeedsMore", "a class {file}:NeedsMore that is made without arguments"),
    ],
)
def test_an_object_that_is_no_harness_is_refused_by_name(file: str, name: str, noun: str):
    paths = {"file": file, "folder": str(Path(file).parent)}
    with refused_at("rollout.harness", noun.format(**paths)):
        load_harness(name.format(**paths), ("policy",))


def test_a_role_that_the_world_does_not_name_is_refused():
    async def chess(episode: Episode) -> None:
        await episode.session("black").complete(episode.task.messages)

    live = episode(ScriptedEngine(replies(["Hi"], RENDERER.tokenizer.encode)))
    with refused_at("episode.session", "a role of the environment (policy), got 'black'"):
        run_virtual(CallableHarness(chess).run(live))

    async def anybody(episode: Episode) -> None:
        episode.session()

    live = episode(ScriptedEngine(replies(["Hi"], RENDERER.tokenizer.encode)), DebateEnv())
    with refused_at("episode.session", "a role"):
        run_virtual(CallableHarness(anybody).run(live))
