"""Worlds of several roles: what each is recorded with, earns and is ended by, and what is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import pytest
from fates import FatedBoxes, Fates

from sparring.algo.credit.members import members
from sparring.batch.flatten import flatten
from sparring.envs.roles import check_roles
from sparring.errors import BadInput, LimitReached
from sparring.generation import GenerateRequest
from sparring.harness.load import CallableHarness
from sparring.protocols import Episode
from sparring.record.recorder import Recorder
from sparring.rollout.config import RetriesConfig, RolloutConfig
from sparring.rollout.runner import Finished, RolloutRunner
from sparring.rollout.scheduler import Scheduler
from sparring.rollout.window import Window
from sparring.store.sqlite import SqliteStore
from sparring.testing.clock import run_virtual
from sparring.testing.scripted_engine import ScriptedEngine
from sparring.testing.toy import ToyEnv, ToyWorld, toy_renderer, toy_task
from sparring.types import Group, Limits, Message, Observation, Outcome, Score, Task, Trajectory

RENDERER = toy_renderer()


def says(text: str) -> Message:
    """A message that a role is told."""
    return Message(role="user", content=text)


class Game(ToyEnv):
    """White opens, black answers, white closes. Replies earn as many tenths as their place in the game."""

    roles = ("white", "black")
    tools = ()

    def __init__(self) -> None:
        super().__init__()
        self.moves: list[tuple[str, str]] = []
        self.scored: Mapping[str, Trajectory] = {}

    async def open(self, task: Task, box: object) -> Observation:
        """The empty board."""
        return Observation(messages=(says("Begin."),), state_key="0")

    async def step_of(self, role: str, reply: Message) -> Observation:
        """The next board."""
        self.moves.append((role, reply.content))
        place = len(self.moves)
        return Observation(messages=(says(reply.content),), reward=place / 10, done=place == 3, state_key=str(place))

    async def score_all(self, trajectories: Mapping[str, Trajectory]) -> Score:
        """White wins."""
        self.scored = dict(trajectories)
        return Score(reward=0.0, per_role={"white": 1.0, "black": -1.0})


class GameWorld(ToyWorld):
    """Makes games, and keeps them."""

    def __init__(self, kind: type[Game] = Game) -> None:
        self.kind = kind
        self.made: list[Game] = []

    def make(self) -> Game:
        """A fresh game."""
        self.made.append(self.kind())
        return self.made[-1]


async def play(episode: Episode) -> None:
    """Two conversations in turns."""
    seen = await episode.env.open(episode.task, episode.box)
    boards: dict[str, list[Message]] = {"white": [], "black": []}
    for role in ("white", "black", "white"):
        boards[role] += seen.messages
        reply = await episode.session(role).complete(boards[role])
        boards[role].append(reply)
        seen = await episode.env.step(reply, role)


def script(request: GenerateRequest) -> tuple[int, ...]:
    """Ids that hang on seed and prompt, as those of a model do."""
    text = "".join("abcdefgh"[(request.sampling.seed >> shift) % 8] for shift in range(0, 9, 3))
    return (*RENDERER.tokenizer.encode(f"{text}{len(request.tokens)}"), RENDERER.stop_ids[0])


def run_rollout(world: GameWorld, harness: object = play, task: Task | None = None, seed: int = 1) -> Finished:
    """One rollout."""
    recorder = Recorder(ScriptedEngine(script), RENDERER, sampling=RolloutConfig().sampling.build())
    config = RolloutConfig(retries=RetriesConfig(rebuilds=0))
    runner = RolloutRunner(world, FatedBoxes(Fates()), recorder, CallableHarness(harness), config)  # type: ignore[arg-type]
    task = task or toy_task(limits=Limits(max_turns=2))
    return run_virtual(runner.run(task, rollout_id="rl/0/0", index=0, seed=seed))[0]


def test_a_rollout_has_the_roles_of_its_world_and_no_other() -> None:
    world = GameWorld()
    done = run_rollout(world)
    white, black = done.rollout.trajectories
    assert [(t.role, t.id, t.usage.turns) for t in (white, black)] == [
        ("white", "rl/0/0/white", 2),
        ("black", "rl/0/0/black", 1),
    ]
    (game,) = world.made
    assert [role for role, _ in game.moves] == ["white", "black", "white"]
    assert game.scored == {"white": white, "black": black}
    seeds = [{s.sampling.seed for s in trajectory.segments if s.sampling} for trajectory in (white, black)]
    assert len(seeds[0] | seeds[1]) == 2, "each role has random numbers of its own"
    spoken = {role: branch for role, (branch,) in done.transcripts.items()}
    assert [m.content for m in spoken["black"].messages] == [game.moves[0][1], game.moves[1][1]]
    assert [m.role for m in spoken["white"].messages] == ["user", "assistant", "user", "assistant"]


def test_each_role_has_its_reward_its_turns_and_its_states() -> None:
    done = run_rollout(GameWorld())
    assert done.score is not None
    assert done.score.per_role_turns == {"white": (0.1, 0.3), "black": (0.2,)}
    assert done.score.per_role_states == {"white": ("0", "2"), "black": ("1",)}
    group = Group(id="rl/0", index=0, task=toy_task(), rollouts=(done.rollout,), scores=(done.score,))
    white, black = members(group, flatten(group, "policy"))
    assert (white.reward, black.reward) == (1.0, -1.0)
    assert (white.per_turn(), black.per_turn()) == ([0.1, 0.3], [0.2])
    assert (white.states(), black.states()) == (["0", "2"], ["1"])
    assert white.step_rewards(1.0)[-1] == pytest.approx(0.9) and black.step_rewards(1.0)[-1] == pytest.approx(-1.0)


def test_a_limit_ends_the_role_that_hit_it() -> None:
    done = run_rollout(GameWorld(), task=toy_task(limits=Limits(max_turns=1)))
    outcomes = {t.role: t.outcome for t in done.rollout.trajectories}
    assert outcomes["white"] == Outcome(kind="truncated", reason="max_turns") == done.rollout.outcome
    assert outcomes["black"] == Outcome(kind="completed", reason="answered")
    assert done.score is not None and done.score.per_role_turns == {"white": (0.1,), "black": (0.2,)}


def test_a_harness_may_go_on_without_the_role_that_hit_a_limit() -> None:
    async def patient(episode: Episode) -> None:
        seen = await episode.env.open(episode.task, episode.box)
        with pytest.raises(LimitReached):
            for _ in range(3):
                await episode.session("white").complete(seen.messages)
        reply = await episode.session("black").complete(seen.messages)
        await episode.env.step(reply, "black")

    done = run_rollout(GameWorld(), patient)
    reasons = [(t.role, t.outcome.reason) for t in done.rollout.trajectories]
    assert reasons == [("white", "max_turns"), ("black", "answered")]
    assert done.rollout.outcome.kind == "truncated"


def test_a_role_that_nobody_asked_has_no_trajectory_and_an_attempt_without_any_has_one() -> None:
    async def alone(episode: Episode) -> None:
        seen = await episode.env.open(episode.task, episode.box)
        episode.session("white")
        await episode.session("black").complete(seen.messages)

    assert [t.role for t in run_rollout(GameWorld(), alone).rollout.trajectories] == ["black"]

    async def broken(episode: Episode) -> None:
        raise ZeroDivisionError

    done = run_rollout(GameWorld(), broken)
    assert [(t.role, t.outcome.kind) for t in done.rollout.trajectories] == [("white", "infra_failed")]


@pytest.mark.parametrize(
    "score",
    [
        Score(reward=0.0, per_role={"white": float("nan")}),
        Score(reward=0.0, per_role={"green": 1.0}),
        Score(reward=0.0, per_turn=(0.0, 0.0)),
    ],
)
def test_a_score_that_no_role_can_be_credited_with_is_the_worlds_failure(score: Score) -> None:
    class Odd(Game):
        async def score_all(self, trajectories: Mapping[str, Trajectory]) -> Score:
            return score

    done = run_rollout(GameWorld(Odd))
    failure = done.rollout.outcome.failure
    assert done.score is None and failure is not None and (failure.error, failure.where) == ("EnvError", "env.score")


def test_a_retry_and_a_store_keep_every_role(tmp_path: Path) -> None:
    class BreaksOnce(Game):
        left = 1

        async def score_all(self, trajectories: Mapping[str, Trajectory]) -> Score:
            type(self).left -= 1
            if type(self).left >= 0:
                raise KeyError("gone")
            return await super().score_all(trajectories)

    store = SqliteStore(tmp_path / "store.sqlite")
    config = RolloutConfig(group_size=2, retries=RetriesConfig(delay_s=0.0))
    engine = ScriptedEngine(script)
    recorder = Recorder(engine, RENDERER, store, sampling=config.sampling.build())
    world = GameWorld(BreaksOnce)
    runner = RolloutRunner(world, FatedBoxes(Fates()), recorder, CallableHarness(play), config)

    async def recorded() -> list[Group]:
        window = Window(1, 0, 1)
        source = world.tasks("train", 1)
        scheduler = Scheduler(runner, source, window, run_seed=1, engine_version=lambda: engine.version)
        groups = [group async for group in scheduler.groups()]
        store.append(*groups, stage="rl")
        return groups

    (group,) = asyncio.run(recorded())
    (stored,) = store.groups(stage="rl")
    assert stored == group and len(group.failed) == 1 and len(group.rollouts) == 2
    again = next(rollout for rollout in group.rollouts if rollout.attempt)
    assert [t.id for t in again.trajectories] == [f"{again.id}/white", f"{again.id}/black"]
    assert sum(t.usage.turns for t in again.trajectories) == 3 and len(engine.requests) == 6, "none is sampled again"
    assert [t.segments for t in group.failed[0].trajectories] == [()], "a token has one owner"
    assert store.load(again.id) == again
    store.close()


def test_ambiguous_names_of_roles_are_refused() -> None:
    def refused(roles: object, kind: type = Game) -> str:
        world = type("World", (kind,), {"roles": roles})()
        with pytest.raises(BadInput) as caught:
            check_roles(world)
        return str(caught.value)

    assert check_roles(Game()) == ("white", "black") and check_roles(ToyEnv()) == ("policy",)
    assert "World: roles: expected roles" in refused(("white", "white"))
    assert "expected a tuple" in refused(())
    assert "got 'white'" in refused("white")
    assert "not beginning with retry-" in refused(("white", "retry-1"))
    assert "not beginning with retry- or broken-" in refused(("white", "broken-1"))
    assert "expected names of letters, digits, _, - and /" in refused(("white", "the other"))
    assert "expected a method" in refused(("a", "b"), ToyEnv)
