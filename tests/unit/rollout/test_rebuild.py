"""Rebuilding: a broken rollout goes on where it broke, and no token of it is sampled twice."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from fates import FatedBoxes, Fates
from tables import with_settings

from sparring.errors import EngineError, NotRebuildable, ToolHostError
from sparring.generation import GenerateRequest
from sparring.harness.load import CallableHarness
from sparring.protocols import Episode
from sparring.record.recorder import Recorder
from sparring.render.demonstrate import reply_tokens
from sparring.rollout.config import RolloutConfig
from sparring.rollout.journal import Journals
from sparring.rollout.runner import Finished, RolloutRunner
from sparring.store.sqlite import SqliteStore
from sparring.testing.clock import run_virtual
from sparring.testing.scripted_engine import ScriptedEngine
from sparring.testing.toy import ADD, ToyEnv, ToyWorld, toy_renderer, toy_task
from sparring.types import Message, Observation, Outcome, Rollout, Score, Task, ToolCall, Trajectory

RENDERER = toy_renderer()


def says(text: str) -> Message:
    """A message that a role is told."""
    return Message(role="user", content=text)


@dataclass
class Weather:
    """What the worlds of a test do otherwise than they should: at which of their calls, counted over all of them, they
    break, and what their answers say besides."""

    breaks: Callable[[int], Exception | None] = lambda number: None
    answer: Callable[[int], str] = lambda world: ""
    step_s: float = 0.0
    score_s: float = 0.0
    rebuildable: bool = True
    calls: int = 0
    worlds: int = 0
    closed: int = 0
    requests: list[GenerateRequest] = field(default_factory=list)
    metrics: Mapping[str, float] = field(default_factory=dict)

    def call(self) -> None:
        """Count a call of a world."""
        self.calls += 1
        error = self.breaks(self.calls)
        if error is not None:
            raise error


class Duel(ToyEnv):
    """A world of two roles with a tool."""

    roles = ("white", "black")
    tools = (ADD,)

    def __init__(self, weather: Weather) -> None:
        super().__init__()
        weather.worlds += 1
        self.weather, self.number = weather, weather.worlds
        self.rebuildable = weather.rebuildable
        self.moves = 0

    async def open(self, task: Task, box: object) -> Observation:
        """The empty board."""
        self.weather.call()
        return Observation(messages=(says("Begin."),), state_key="0")

    async def step_of(self, role: str, reply: Message) -> Observation:
        """The next board, or what the tool says."""
        await asyncio.sleep(self.weather.step_s)
        self.weather.call()
        self.moves += 1
        said = f"{self.moves}: {reply.content}{self.weather.answer(self.number)}"
        answers = tuple(Message(role="tool", content=said, tool_call_id=c.id, name=c.name) for c in reply.tool_calls)
        return Observation(messages=answers or (says(said),), reward=self.moves / 10, state_key=str(self.moves))

    async def score_all(self, trajectories: Mapping[str, Trajectory]) -> Score:
        """White wins."""
        await asyncio.sleep(self.weather.score_s)
        self.weather.call()
        return Score(reward=1.0, per_role={"white": 1.0, "black": -1.0})

    async def close(self) -> None:
        """Count it."""
        self.weather.closed += 1


class DuelWorld(ToyWorld):
    """Makes duels."""

    def __init__(self, weather: Weather) -> None:
        self.weather = weather

    def make(self) -> Duel:
        """A fresh duel."""
        return Duel(self.weather)


async def play(episode: Episode) -> None:
    """Five turns of two roles: with tools, the same prompt twice, and a history that is cut short in between."""
    seen = await episode.env.open(episode.task, episode.box)
    boards: dict[str, list[Message]] = {"white": [], "black": []}
    for turn, role in enumerate(("white", "white", "black", "white", "black")):
        boards[role] += seen.messages
        if turn == 3:
            boards[role] = [says("In short: " + boards[role][-1].content)]
            await episode.session(role).complete(boards[role], episode.env.tools)  # a draft, not used
        reply = await episode.session(role).complete(boards[role], episode.env.tools)
        boards[role].append(reply)
        seen = await episode.env.step(reply, role)


def script(request: GenerateRequest) -> tuple[int, ...]:
    """Ids that hang on seed and prompt, as those of a model do; white's first reply calls a tool."""
    drawn = hash((request.sampling.seed, request.tokens))
    text = "".join("abcdefgh"[(drawn >> shift) % 8] for shift in range(0, 15, 3))
    if len(request.tokens) >= 300 and drawn % 2:
        return tuple(reply_tokens(RENDERER, Message(role="assistant", content=text), (ADD,)))
    call = ToolCall(id="call_0", name="add", arguments={"a": drawn % 100, "b": 1})
    return tuple(reply_tokens(RENDERER, Message(role="assistant", content=text, tool_calls=(call,)), (ADD,)))


def made(
    weather: Weather,
    harness: object = play,
    store: SqliteStore | None = None,
    fail_on: tuple[int, ...] = (),
    latency_s: float = 1.0,
    **config: object,
) -> tuple[RolloutRunner, ScriptedEngine]:
    """A runner and its engine."""
    settings = with_settings(RolloutConfig(), **{"max_turn_tokens": 200, **config})
    engine = ScriptedEngine(script, fail_on=fail_on, latency_s=latency_s)
    recorder = Recorder(engine, RENDERER, store, sampling=settings.sampling.build())
    parts = (DuelWorld(weather), FatedBoxes(Fates()), recorder, CallableHarness(harness), settings)
    return RolloutRunner(*parts, log=Journals(store)), engine


def ran(weather: Weather, harness: object = play, fail_on: tuple[int, ...] = (), **config: object) -> Finished:
    """One rollout; `weather.requests` are those that the engine answered."""
    runner, engine = made(weather, harness, fail_on=fail_on, **config)
    done = run_virtual(runner.run(toy_task(), rollout_id="rl/0/0", index=0, seed=1))[0]
    weather.requests = [request for n, request in enumerate(engine.requests, 1) if n not in fail_on]
    weather.metrics = runner.metrics()
    assert weather.closed == weather.worlds and engine.held == {}
    return done


def process(path: Path, weather: Weather, *, lives_s: float | None = None, **config) -> Finished | None:
    """A process that runs the rollout on the store of the ones before, until it is stopped; `weather.requests` are
    those of its engine."""
    store = SqliteStore(path / "store.sqlite")
    runner, engine = made(weather, store=store, **config)

    async def run() -> Finished | None:
        try:
            async with asyncio.timeout(lives_s):
                return await runner.run(toy_task(), rollout_id="rl/0/0", index=0, seed=1)
        except TimeoutError:
            return None

    done = run_virtual(run())[0]
    weather.requests = engine.requests
    store.close()
    return done


def durable(path: Path, attempt: str = "rl/0/0") -> int:
    """Turns of an attempt that are in the store."""
    store = SqliteStore(path / "store.sqlite")
    names = [name for name in store.trajectories(attempt) if "retry" not in name[len(attempt) :]]
    num_turns = sum(segment.model is not None for name in names for segment in store.turns(name))
    store.close()
    return num_turns


def everything(done: Finished) -> object:
    """All that a rollout is, but how long it took, and which prompt tokens an engine had in its cache."""
    trajectories = [
        (t.id, t.role, t.segments, t.outcome, replace(t.usage, cached_tokens=0)) for t in done.rollout.trajectories
    ]
    return done.rollout.id, trajectories, done.score, done.transcripts


def once(number: int, error: Exception) -> Callable[[int], Exception | None]:
    """Only that call breaks."""
    return lambda call: error if call == number else None


def tokens(rollout: Rollout) -> int:
    """Sampled tokens."""
    return sum(len(s.tokens) for t in rollout.trajectories for s in t.segments if s.model is not None)


CLEAN = Weather()
UNINTERRUPTED = ran(CLEAN)


def test_the_uninterrupted_rollout_has_what_the_others_are_compared_by() -> None:
    white, black = UNINTERRUPTED.rollout.trajectories
    assert (white.usage.turns, black.usage.turns, CLEAN.calls) == (4, 2, 7)
    assert len(list(white.branches())) == 3 and {s.source for s in white.segments} >= {"tool", "prompt", "policy"}
    assert len({r.sampling.seed for r in CLEAN.requests}) == 3, "two roles, and one prompt twice"


@pytest.mark.parametrize("call", range(1, 8))
def test_a_world_that_breaks_at_any_call_is_rebuilt_to_there(call: int) -> None:
    weather = Weather(breaks=once(call, ToolHostError("tool host: 503")))
    done = ran(weather)
    assert everything(done) == everything(UNINTERRUPTED)
    assert weather.requests == CLEAN.requests, "the engine samples each turn once"
    assert (weather.worlds, done.rollout.attempt) == (2, 1)
    assert [(r.id, r.outcome.kind, tokens(r)) for r in done.broken] == [("rl/0/0/broken-0", "infra_failed", 0)]


@pytest.mark.parametrize("request_number", range(1, 7))
def test_an_engine_that_fails_at_any_request_is_asked_for_that_alone(request_number: int) -> None:
    weather = Weather()
    done = ran(weather, fail_on=(request_number,))
    assert everything(done) == everything(UNINTERRUPTED) and weather.requests == CLEAN.requests


def test_a_rollout_that_breaks_ever_further_goes_on_as_long_as_it_gets_further() -> None:
    weather = Weather()
    pending = [2, 3, 4, 5, 6, 7]  # of the calls of one world: each breaks once, in a world of its own

    def breaks(number: int) -> Exception | None:
        weather_call = number - started[0]
        if pending and weather_call == pending[0]:
            pending.pop(0)
            started[0] = number
            return ToolHostError(f"tool host: call {number}")
        return None

    started = [0]
    weather.breaks = breaks
    done = ran(weather, rebuilds=1)
    assert everything(done) == everything(UNINTERRUPTED) and weather.requests == CLEAN.requests
    assert (weather.worlds, len(done.broken)) == (7, 6)


def test_a_world_that_breaks_on_the_way_back_keeps_what_was_sampled() -> None:
    broken_calls = {5, 7, 11}  # call 5 of the first world, calls 2 and 4 of the next two
    done = ran(weather := Weather(breaks=lambda n: ToolHostError("503") if n in broken_calls else None))
    assert everything(done) == everything(UNINTERRUPTED) and weather.requests == CLEAN.requests
    lost = ran(weather := Weather(breaks=lambda n: ToolHostError("503") if n in broken_calls else None), rebuilds=2)
    assert lost.score is None and weather.requests == CLEAN.requests[:5]
    assert tokens(lost.rollout) == sum(tokens_of(r) for r in CLEAN.requests[:5]) and not sum(map(tokens, lost.broken))


def tokens_of(request: GenerateRequest) -> int:
    """Tokens that the engine says to a request."""
    return len(script(request))


def test_a_world_that_answers_differently_starts_over_and_is_counted() -> None:
    breaks = once(5, ToolHostError("503"))
    weather = Weather(breaks=breaks, answer=lambda world: f" (at {world} o'clock)")
    done = ran(weather)
    assert done.score is not None and (done.rollout.id, done.rollout.attempt) == ("rl/0/0/retry-2", 2)
    first, differs = done.broken
    assert (first.id, tokens(first), differs.id) == ("rl/0/0/broken-0", 0, "rl/0/0") and tokens(differs) > 0
    failure = differs.outcome.failure
    assert failure is not None and failure.error == NotRebuildable.__name__
    assert "the world's answer 1 to white is not the recorded one" in failure.message
    assert len(weather.requests) == 5 + 6, "what the first attempt sampled, and a whole rollout"
    assert weather.metrics == {"rollout/rebuilt": 0.0, "rollout/started_over": 1.0}


def test_a_world_that_says_that_it_cannot_starts_over() -> None:
    weather = Weather(breaks=once(5, ToolHostError("503")), rebuildable=False)
    done = ran(weather)
    assert (done.rollout.id, weather.worlds) == ("rl/0/0/retry-1", 2)
    assert [r.id for r in done.broken] == ["rl/0/0"] and tokens(done.broken[0]) > 0
    assert len(weather.requests) == 5 + 6


def test_a_world_may_refuse_by_name() -> None:
    second = once(6, NotRebuildable("the game server keeps this game"))
    weather = Weather(breaks=lambda n: ToolHostError("503") if n == 5 else second(n))
    done = ran(weather)
    assert done.rollout.id == "rl/0/0/retry-2" and done.score is not None
    assert "the game server keeps this game" in str(done.broken[1].outcome.failure)


def test_a_world_that_is_never_the_same_and_always_breaks_is_given_up() -> None:
    weather = Weather(answer=str)
    weather.breaks = lambda number: ToolHostError("503") if number % 3 == 0 else None
    done = ran(weather, rebuilds=2)
    assert done.score is None and len(done.broken) <= 4


@pytest.mark.parametrize("swallows", [False, True])
def test_a_harness_that_asks_for_something_else_starts_over(swallows: bool) -> None:
    asked: list[int] = []

    async def drifts(episode: Episode) -> None:
        seen = await episode.env.open(episode.task, episode.box)
        asked.append(1)
        session = episode.session("white")
        try:
            await session.complete([*seen.messages, says(f"attempt {min(len(asked), 2)}")])
        except NotRebuildable:
            if not swallows:
                raise
        await episode.env.step(Message(role="assistant", content="move"), "white")

    weather = Weather(breaks=once(2, ToolHostError("503")))
    done = ran(weather, drifts)
    assert done.rollout.id == "rl/0/0/retry-2" and len(weather.requests) == 2
    assert "a request is not the recorded one" in str(done.broken[1].outcome.failure)


def test_a_harness_that_ends_earlier_than_before_starts_over() -> None:
    lives: list[int] = []

    async def tires(episode: Episode) -> None:
        lives.append(1)
        await episode.env.open(episode.task, episode.box)
        for turn in range(3 if len(lives) == 1 else 1):
            await episode.session("white").complete([says(f"turn {turn}")])
        if len(lives) == 1:
            raise EngineError("engine: gone")

    done = ran(Weather(), tires)
    assert done.rollout.id == "rl/0/0/retry-2"
    assert "the rollout ended with 2 recorded replies left" in str(done.broken[1].outcome.failure)


@pytest.mark.parametrize(
    ("step_s", "breaks", "lives_s"),
    [
        *((0.25, False, [life_s]) for life_s in (0.5, 1.1, 1.5, 2.4, 2.6, 3.6, 4.7, 5.9, 6.5, 7.1)),
        (0.01, False, [1.1] * 5),
        (0.25, True, [4.9]),
    ],
)
def test_processes_that_are_stopped_anywhere_are_gone_on_from(
    step_s: float, breaks: bool, lives_s: list[float], tmp_path: Path
) -> None:
    """Once, again and again, and after the world broke."""
    weather = Weather(step_s=step_s)
    if breaks:
        weather.breaks = once(3, ToolHostError("503"))
    num_durable = [0]
    for life_s in lives_s:
        assert process(tmp_path, weather, lives_s=life_s) is None
        num_durable.append(durable(tmp_path))
    assert num_durable == ([0, 3] if breaks else [0, 1, 2, 3, 4, 5]) or len(lives_s) == 1 and not breaks
    assert weather.worlds == len(lives_s) + breaks
    done = process(tmp_path, weather)
    assert done is not None and everything(done) == everything(UNINTERRUPTED)
    assert breaks or (done.broken == () and done.rollout.attempt == 0)
    assert weather.requests == CLEAN.requests[num_durable[-1] :], "no turn that is durable is sampled again"


def test_a_world_that_answers_differently_in_the_next_process_starts_over(tmp_path: Path) -> None:
    weather = Weather(step_s=0.25, answer=lambda world: f" (at {world} o'clock)")
    assert process(tmp_path, weather, lives_s=4.9) is None
    done = process(tmp_path, weather)
    assert done is not None and done.score is not None and done.rollout.id == "rl/0/0/retry-1"
    (ended,) = done.broken
    assert ended.id == "rl/0/0" and tokens(ended) > 0 and len(weather.requests) == 6


@pytest.mark.parametrize("stopped_s", [1.5, 4.0])
def test_a_rollout_that_started_over_and_is_stopped_goes_on_from_there(stopped_s: float, tmp_path: Path) -> None:
    weather = Weather(step_s=0.25, breaks=once(4, ToolHostError("503")), rebuildable=False)
    first_s = 3.75 + 0.5  # three turns and their steps, of which the last breaks, and the pause
    assert process(tmp_path, weather, lives_s=first_s + stopped_s) is None
    num_durable = durable(tmp_path, "rl/0/0/retry-1")
    weather.rebuildable = True
    done = process(tmp_path, weather)
    assert done is not None and done.rollout.id == "rl/0/0/retry-1" and done.rollout.attempt == 1
    assert [(s.tokens, s.logprobs) for t in done.rollout.trajectories for s in t.segments] == [
        (s.tokens, s.logprobs) for t in UNINTERRUPTED.rollout.trajectories for s in t.segments
    ]
    (ended,) = done.broken
    assert (ended.id, ended.attempt, ended.outcome.kind) == ("rl/0/0", 0, "infra_failed")
    assert tokens(ended) == sum(tokens_of(request) for request in CLEAN.requests[:3])
    assert weather.requests == [replace_id(request) for request in CLEAN.requests[num_durable:]]


def replace_id(request: GenerateRequest) -> GenerateRequest:
    """The request as the second attempt asks it."""
    renamed = {"id": request.id, "conversation": request.conversation or ""}
    return replace(request, **{key: name.replace("rl/0/0", "rl/0/0/retry-1") for key, name in renamed.items()})


@pytest.mark.parametrize("second_s", [0.1, 30.0])
def test_the_policys_time_is_over_where_it_was(second_s: float, tmp_path: Path) -> None:
    """Of a process that was stopped while it scored, whatever time the next one takes."""
    weather = Weather(step_s=4.0, score_s=50.0)
    assert process(tmp_path, weather, lives_s=40.0, timeout_s=10.0) is None
    weather.step_s = second_s
    done = process(tmp_path, weather, timeout_s=10.0)
    assert done is not None and done.rollout.outcome == Outcome(kind="truncated", reason="timeout")
    assert weather.requests == [] and sum(t.usage.turns for t in done.rollout.trajectories) == 3


def test_the_policys_time_of_a_rollout_that_is_rebuilt_is_counted_once() -> None:
    weather = Weather(step_s=4.0, breaks=once(5, ToolHostError("503")))
    done = ran(weather, timeout_s=21.0)
    assert done.rollout.outcome.kind == "completed" and done.rollout.attempt == 1
    late = ran(Weather(step_s=4.0, breaks=once(5, ToolHostError("503"))), timeout_s=19.0)
    assert late.rollout.outcome.reason == "timeout" and late.rollout.attempt == 1


def test_a_rollout_whose_time_is_over_is_scored_again_as_it_is() -> None:
    weather = Weather(step_s=4.0, breaks=once(5, ToolHostError("scoring: 503")))
    done = ran(weather, timeout_s=10.0)
    assert (done.rollout.outcome.reason, done.rollout.attempt, weather.worlds) == ("timeout", 1, 2)
    assert done.score is not None and len(weather.requests) == 3


AGENT = """
import json, sys

def ask(request):
    print(json.dumps(request), flush=True)
    return json.loads(sys.stdin.readline())["said"]

heard = [ask({"open": True})]
for turn in range(3):
    heard.append(ask({"complete": heard}))
    heard.append(ask({"step": heard[-1]}))
"""
"""A program that holds the conversation: it knows messages as text, and nothing of records."""


async def program(episode: Episode) -> None:
    """Serve the program in a process of its own until it ends."""
    agent = await asyncio.create_subprocess_exec(
        sys.executable, "-I", "-c", AGENT, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert agent.stdin is not None and agent.stdout is not None
    session = episode.session("white")
    try:
        while line := await agent.stdout.readline():
            request = json.loads(line)
            if "open" in request:
                said = (await episode.env.open(episode.task, episode.box)).messages[0].content
            elif "step" in request:
                reply = Message(role="assistant", content=request["step"])
                said = (await episode.env.step(reply, "white")).messages[0].content
            else:
                roles = ["user", "assistant"]
                history = [Message(role=roles[n % 2], content=text) for n, text in enumerate(request["complete"])]
                said = (await session.complete(history)).content
            agent.stdin.write(json.dumps({"said": said}).encode() + b"\n")
    finally:
        agent.stdin.close()
        await agent.wait()


def test_a_harness_in_a_process_of_its_own_is_rebuilt() -> None:
    def run(weather: Weather) -> tuple[Finished, list[GenerateRequest]]:
        runner, engine = made(weather, program, delay_s=0.0, latency_s=0.0)
        return asyncio.run(runner.run(toy_task(), rollout_id="rl/0/0", index=0, seed=1)), engine.requests

    clean, requests = run(Weather())
    assert clean.rollout.trajectories[0].usage.turns == 3 and clean.score is not None
    done, again = run(weather := Weather(breaks=once(3, ToolHostError("503"))))
    assert weather.worlds == 2 and everything(done) == everything(clean) and again == requests
