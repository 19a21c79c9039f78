"""One rollout to its typed outcome, through every way of breaking (law 6)."""

import asyncio
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from fates import FatedBoxes, Fates, make_stack
from virtual import on_virtual_clock

from sparring.errors import (
    EngineError,
    JudgeError,
    LimitReached,
    PolicyFailure,
    SandboxError,
    StoreError,
    ToolHostError,
)
from sparring.harness.chat import ChatHarness
from sparring.rollout.runner import Finished, RolloutRunner
from sparring.testing.clock import run_virtual
from sparring.testing.scripted_engine import ScriptedEngine
from sparring.testing.toy import ToyEnv, ToyWorld, toy_renderer, toy_script, toy_task
from sparring.types import BoxSpec, Limits, Message, Observation, Outcome, Rollout, Score, Trajectory

BOXED = replace(toy_task(), box=BoxSpec())


def once(error: BaseException) -> Callable[[int], BaseException | None]:
    """Only the first call breaks."""
    return lambda number: error if number == 0 else None


def always(error: BaseException) -> Callable[[int], BaseException | None]:
    """Every call breaks."""
    return lambda number: error


def sampled_tokens(rollout: Rollout) -> list[tuple[tuple[int, ...], tuple[float, ...] | None]]:
    """What the policy sampled."""
    return [(s.tokens, s.logprobs) for t in rollout.trajectories for s in t.segments if s.model is not None]


def test_a_good_rollout_is_scored_and_everything_is_closed() -> None:
    stack = make_stack()
    done = stack.run(BOXED)
    assert done.rollout.outcome == Outcome(kind="completed", reason="answered")
    assert done.score is not None and done.score.reward == 1.0 and done.broken == ()
    assert (done.rollout.id, done.rollout.attempt, done.rollout.purpose) == ("rl/0/0", 0, "train")
    (trajectory,) = done.rollout.trajectories
    assert trajectory.usage.turns == 2 and trajectory.timing.wall_s == trajectory.timing.generate_s == 2.0
    assert stack.fates.open_worlds == stack.fates.open_boxes == 0 and stack.engine.held == {}


@pytest.mark.parametrize("where", ["take", "open", "step", "score"])
@pytest.mark.parametrize("error", [SandboxError("gone"), ToolHostError("refused"), ValueError("bug")])
def test_a_crash_is_rebuilt_and_samples_no_token_again(where: str, error: Exception) -> None:
    if where == "take" and isinstance(error, ValueError):
        error = SandboxError("untyped errors of the pool are the pool's to wrap")
    clean = make_stack().run(BOXED)
    stack = make_stack(Fates(**{where: once(error)}))
    done = stack.run(BOXED)
    assert done.rollout.outcome.kind == "completed" and done.score == clean.score
    assert (done.rollout.id, done.rollout.attempt) == ("rl/0/0", 1)
    assert sampled_tokens(done.rollout) == sampled_tokens(clean.rollout) and len(stack.engine.requests) == 2
    (broken,) = done.broken
    assert (broken.id, broken.attempt, broken.outcome.kind) == ("rl/0/0/broken-0", 0, "infra_failed")
    assert sampled_tokens(broken) == [], "a token has one owner"
    assert broken.outcome.failure is not None and str(error) in str(broken.outcome.failure)
    assert stack.fates.open_worlds == stack.fates.open_boxes == 0 and stack.engine.held == {}


@pytest.mark.parametrize("where", ["step", "score"])
def test_a_failure_that_every_world_has_is_never_the_policys(where: str) -> None:
    stack = make_stack(Fates(**{where: always(SandboxError("box: died of signal 9"))}), rebuilds=10)
    done = stack.run(BOXED)
    assert done.score is None and done.rollout.outcome.kind == "infra_failed"
    assert len(done.broken) == 10 and len(stack.engine.requests) == len(sampled_tokens(done.rollout))
    assert stack.fates.open_worlds == stack.fates.open_boxes == 0


def test_a_different_second_failure_is_not_the_policys() -> None:
    fates = Fates(step=lambda number: SandboxError(f"box: failure {number}"))
    done = make_stack(fates, rebuilds=2).run(BOXED)
    assert done.score is None and done.rollout.outcome.kind == "infra_failed"
    assert [r.attempt for r in (*done.broken, done.rollout)] == [0, 1, 2]


@pytest.mark.parametrize(
    "fates",
    [
        Fates(take=always(SandboxError("no user namespaces"))),
        Fates(open=always(ValueError("bad data row"))),
        Fates(step=always(JudgeError("the tool's own judge: 503"))),
    ],
)
def test_failures_that_the_policy_cannot_have_caused_never_become_a_reward(fates: Fates) -> None:
    done = make_stack(fates, rebuilds=3).run(BOXED)
    assert done.score is None and done.rollout.outcome.kind in ("infra_failed", "judge_failed")
    assert len(done.broken) == 3


@pytest.mark.parametrize("fate", [JudgeError("judge: 503"), 1000.0])
def test_a_judge_that_fails_scores_the_same_conversation_again(fate: BaseException | float) -> None:
    stack = make_stack(Fates(score=lambda number: fate if number < 2 else None), rebuilds=2)
    done = stack.run(BOXED)
    assert done.score is not None and done.score.reward == 1.0 and done.broken == ()
    assert done.rollout.id == "rl/0/0" and len(stack.engine.requests) == 2
    assert stack.fates.calls == {"take": 1, "open": 1, "step": 2, "score": 3, "close": 1}


def test_a_judge_that_fails_for_good_takes_the_rollout_out_of_its_group_unsampled() -> None:
    stack = make_stack(Fates(score=always(JudgeError("judge: 503"))), rebuilds=3)
    done = stack.run(BOXED)
    assert done.score is None and done.rollout.outcome.kind == "judge_failed" and done.broken == ()
    assert stack.fates.calls["score"] == 4 and len(stack.engine.requests) == 2


def test_a_dead_engine_never_becomes_a_reward() -> None:
    engine = ScriptedEngine(toy_script(toy_renderer()), fail_on=range(2, 100))
    done = make_stack(engine=engine, rebuilds=1).run(toy_task())
    assert done.score is None and done.rollout.outcome.kind == "infra_failed"
    assert done.rollout.outcome.failure is not None and done.rollout.outcome.failure.error == EngineError.__name__


def test_no_retries_means_none() -> None:
    done = make_stack(Fates(step=once(SandboxError("gone"))), rebuilds=0).run(toy_task())
    assert done.score is None and done.broken == () and done.rollout.outcome.kind == "infra_failed"


def test_slow_commands_are_truncated_and_still_scored() -> None:
    stack = make_stack(Fates(step=lambda number: 40.0), timeout_s=30.0)
    done = stack.run(BOXED)
    assert done.rollout.outcome == Outcome(kind="truncated", reason="timeout")
    assert done.score is not None and done.score.reward == 0.0
    timing = done.rollout.trajectories[0].timing
    assert (timing.wall_s, timing.generate_s, timing.world_s) == (41.0, 1.0, 40.0)
    assert sampled_tokens(done.rollout) and stack.fates.open_worlds == stack.fates.open_boxes == 0


def test_waiting_for_a_box_is_not_on_the_policys_clock() -> None:
    done = make_stack(Fates(take=lambda number: 100.0), timeout_s=10.0).run(BOXED)
    assert done.rollout.outcome.kind == "completed"
    late = make_stack(Fates(take=lambda number: 1000.0), rebuilds=0).run(BOXED)
    assert late.score is None and late.rollout.outcome.kind == "infra_failed"


def test_a_judge_that_hangs_has_failed() -> None:
    done = make_stack(Fates(score=lambda number: 1000.0), rebuilds=0).run(toy_task())
    assert done.score is None and done.rollout.outcome.kind == "judge_failed"


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        (Limits(max_turns=1), "max_turns"),
        (Limits(max_tokens=4), "max_tokens"),
        (Limits(max_tool_calls=0), "max_tool_calls"),
    ],
)
def test_limits_truncate(limits: Limits, reason: str) -> None:
    done = make_stack().run(replace(toy_task(), limits=limits))
    assert done.rollout.outcome == Outcome(kind="truncated", reason=reason)
    assert done.score is not None and done.score.reward == 0.0


def test_the_recipes_limits_replace_the_tasks() -> None:
    done = make_stack(max_turns=1).run(toy_task())
    assert done.rollout.outcome.reason == "max_turns" and done.rollout.task.limits.max_turns == 1


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (PolicyFailure("cannot be acted on"), Outcome(kind="policy_failed", reason="malformed")),
        (LimitReached("resources", "out of memory"), Outcome(kind="policy_failed", reason="resources")),
        (LimitReached("context_length", "full"), Outcome(kind="truncated", reason="context_length")),
        (asyncio.CancelledError(), Outcome(kind="cancelled", reason="cancelled")),
    ],
)
def test_the_error_that_ends_a_conversation_keeps_its_type(error: BaseException, outcome: Outcome) -> None:
    stack = make_stack(Fates(step=always(error)))
    done = stack.run(BOXED)
    assert done.rollout.outcome == outcome and done.broken == ()
    assert (done.score is not None) == outcome.trainable
    assert stack.fates.open_worlds == stack.fates.open_boxes == 0


def test_a_full_disk_is_no_rollout_failure() -> None:
    stack = make_stack(Fates(step=always(StoreError("disk full"))))
    with pytest.raises(StoreError):
        stack.run(BOXED)
    assert stack.fates.open_worlds == stack.fates.open_boxes == 0


@on_virtual_clock
async def test_cancelling_closes_everything() -> None:
    stack = make_stack(Fates(step=lambda number: 1000.0))
    task = asyncio.create_task(stack.runner.run(BOXED, rollout_id="rl/0/0", index=0, seed=1))
    await asyncio.sleep(5)
    assert stack.fates.open_worlds == stack.fates.open_boxes == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert stack.fates.open_worlds == stack.fates.open_boxes == 0 and stack.engine.held == {}


class OddWorld(ToyWorld):
    """The toy world, with an answer or a score in place of its own."""

    def __init__(self, *, said: object = None, scored: object = None, made: Exception | None = None) -> None:
        self.said, self.scored, self.made = said, scored, made
        self.makes = 0

    def make(self) -> ToyEnv:
        """A world; the first time, `made` is raised."""
        self.makes += 1
        if self.made is not None and self.makes == 1:
            raise self.made
        world = self

        class Odd(ToyEnv):
            async def step(self, reply: Message) -> Observation:
                return await super().step(reply) if world.said is None else world.said

            async def score(self, trajectory: Trajectory) -> Score | None:
                if isinstance(world.scored, Exception):
                    raise world.scored
                return await super().score(trajectory) if world.scored is None else world.scored

        return Odd()


def odd(world: OddWorld, retries: int = 0) -> Finished:
    """One rollout in it."""
    stack = make_stack(rebuilds=retries)
    runner = RolloutRunner(world, FatedBoxes(stack.fates), stack.recorder, ChatHarness(), stack.runner.config)
    return run_virtual(runner.run(toy_task(), rollout_id="rl/0/0", index=0, seed=1))[0]


def test_a_world_that_cannot_be_made_is_tried_again() -> None:
    done = odd(OddWorld(made=OSError("no route to the game server")), retries=1)
    assert done.score is not None and done.score.reward == 1.0
    (broken,) = done.broken
    assert broken.outcome.kind == "infra_failed" and "no route to the game server" in str(broken.outcome.failure)


@pytest.mark.parametrize(
    ("world", "message"),
    [
        (OddWorld(scored=Score(reward=math.nan)), "finite number as reward"),
        (OddWorld(scored=Score(reward=math.inf)), "finite number as reward"),
        (OddWorld(scored=Score(reward="1")), "finite number as reward"),
        (OddWorld(scored=0.5), "expected a Score"),
        (OddWorld(said=()), "expected an Observation"),
        (OddWorld(said=Observation(messages=(Message(role="user", content="\ud800"),))), "surrogates not allowed"),
    ],
)
def test_an_invalid_score_or_observation_is_the_environments_failure(world: OddWorld, message: str) -> None:
    done = odd(world)
    assert done.score is None and done.rollout.outcome.kind == "infra_failed"
    assert done.rollout.outcome.failure is not None and message in done.rollout.outcome.failure.message


def test_a_scorer_may_report_a_failure_of_the_policy() -> None:
    done = odd(OddWorld(scored=PolicyFailure("the file to grade was deleted")))
    assert done.rollout.outcome == Outcome(kind="policy_failed", reason="malformed") and done.broken == ()
    assert done.score == Score(reward=0.0, success=False)


def test_an_error_while_closing_changes_no_outcome() -> None:
    stack = make_stack(Fates(close=lambda number: ValueError("busy") if number == 0 else 1000.0))
    assert stack.run(BOXED).rollout.outcome.kind == "completed"
    assert stack.run(BOXED).rollout.outcome.kind == "completed"
    assert [type(e).__name__ for e in stack.runner.close_failures] == ["EnvError", "EnvError"]
    assert "busy" in str(stack.runner.close_failures[0]) and "not closed" in str(stack.runner.close_failures[1])
    assert stack.fates.open_boxes == 0
