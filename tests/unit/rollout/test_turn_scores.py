"""What a world says of single turns reaches the score."""

from dataclasses import replace

import pytest
from fates import FatedBoxes, Fates, make_stack
from segments import sampled

from sparring.envs.answers import rated
from sparring.envs.base import final_text
from sparring.errors import HarnessError
from sparring.harness.chat import ChatHarness
from sparring.rollout.guarded_env import GuardedEnv
from sparring.rollout.runner import Finished, RolloutRunner
from sparring.testing.clock import run_virtual
from sparring.testing.toy import ToyEnv, ToyWorld, toy_task
from sparring.types import (
    Label,
    Limits,
    Message,
    Observation,
    Outcome,
    Score,
    Task,
    ToolCall,
    Trajectory,
)


class PayingEnv(ToyEnv):
    """The first reply earns a quarter, made at the door; the second is made in the hall."""

    reward: object = 0.25

    async def open(self, task: Task, box: object) -> Observation:
        return replace(await super().open(task, None), state_key="door")

    async def step(self, reply: Message) -> Observation:
        answer = await super().step(reply)
        return answer if answer.done else replace(answer, reward=self.reward, state_key="hall")


class PayingEachEnv(PayingEnv):
    """Each reply earns a quarter."""

    async def step(self, reply: Message) -> Observation:
        return Observation(reward=0.25, state_key="hall")


class SayingEnv(PayingEnv):
    """It says itself what turns earned."""

    async def score(self, trajectory: Trajectory) -> Score | None:
        return Score(reward=1.0, per_turn=(0.0, 1.0), states=(None, "end"))


class BrokenEnv(PayingEnv):
    """It earns what is no number."""

    reward = float("nan")


def played(env: type[ToyEnv], task: Task) -> Finished:
    stack = make_stack(rebuilds=0)

    class World(ToyWorld):
        def make(self) -> ToyEnv:
            return env()

    runner = RolloutRunner(World(), FatedBoxes(Fates()), stack.recorder, ChatHarness(), stack.config)
    return run_virtual(runner.run(task, rollout_id="rl/0/0", index=0, seed=1))[0]


def test_rewards_and_states_of_turns_are_in_the_score() -> None:
    score = played(PayingEnv, toy_task()).score
    assert score is not None and (score.reward, score.per_turn, score.states) == (1.0, (0.25, 0.0), ("door", "hall"))


def test_a_turn_that_nobody_answered_earned_nothing() -> None:
    score = played(PayingEnv, toy_task(limits=Limits(max_turns=1))).score
    assert score is not None and (score.per_turn, score.states) == ((0.25,), ("door",))


CALLS = Message(role="assistant", tool_calls=(ToolCall(id="a", name="add", arguments={"a": 1, "b": 2}),))
SAYS = Message(role="assistant", content="3")


def asked(*replies: tuple[Label, Message]) -> Trajectory:
    """Replies to requests that a client made in this order."""
    segments = tuple(
        sampled(at, None, (at,), message=message, label=label) for at, (label, message) in enumerate(replies)
    )
    outcome = Outcome(kind="completed", reason="answered")
    return Trajectory(id="rl/0/0", task="t", role="policy", segments=segments, outcome=outcome)


@pytest.mark.parametrize(
    ("replies", "earned", "stood"),
    [
        ([("agent", CALLS), ("agent", SAYS)], (0.25, 0.0), ("door", "hall")),
        ([("auxiliary", SAYS), ("agent", CALLS), ("lost", SAYS), ("agent", SAYS)], (0.25, 0.0), ("door", "hall")),
        ([("agent", CALLS), ("compaction", SAYS), ("agent", SAYS)], (0.25, 0.0, 0.0), ("door", None, "hall")),
        ([("agent", SAYS), ("agent", CALLS)], (0.0, 0.25), ("hall", "door")),  # the second was answered first
    ],
)
def test_what_the_world_answered_is_the_turn_of_that_message(
    replies: list[tuple[Label, Message]], earned: tuple[float, ...], stood: tuple[str | None, ...]
) -> None:
    """Neither place nor clock tells: a title, a summary and what never arrived shift nothing."""
    trajectory = asked(*replies)

    async def play() -> Score:
        env = GuardedEnv(PayingEnv)
        await env.open(toy_task(), None)
        for reply in (CALLS, SAYS):
            await env.step(reply)
        return env.with_turns(Score(reward=1.0), [trajectory])

    score = run_virtual(play())[0]
    assert (score.per_turn, score.states) == (earned, stood)
    assert rated(score, ["policy"], [trajectory]) == score


def earned(trajectory: Trajectory, *replies: Message) -> Score:
    """What the paying world says of the turns of a trajectory when it was given these replies."""

    async def play() -> Score:
        env = GuardedEnv(PayingEachEnv)
        await env.open(toy_task(), None)
        for reply in replies:
            await env.step(reply)
        return env.with_turns(Score(reward=1.0), [trajectory])

    return run_virtual(play())[0]


def test_a_program_that_runs_the_calls_of_a_reply_one_by_one_earns_for_the_reply() -> None:
    """With ids of its own, and the server's name before the tool's in what was sampled."""
    both = replace(CALLS, content="I call", tool_calls=(*CALLS.tool_calls, replace(CALLS.tool_calls[0], id="b")))
    trajectory = asked(("agent", both), ("lost", SAYS), ("agent", SAYS))
    one = replace(CALLS, tool_calls=(replace(CALLS.tool_calls[0], id="call_1"),))
    score = earned(trajectory, one, one, SAYS)
    assert (score.per_turn, score.states) == ((0.5, 0.25), ("door", "hall"))
    assert earned(trajectory, one).states == ("door", "hall"), "the second was not answered"
    filled = replace(one, tool_calls=(replace(one.tool_calls[0], arguments={"a": 1.0, "b": 2, "base": 10}),))
    assert earned(trajectory, filled, SAYS).per_turn == (0.25, 0.25), "the client wrote a default"
    named = replace(both, tool_calls=tuple(replace(call, name="mcp__world__add") for call in both.tool_calls))
    assert earned(asked(("agent", SAYS), ("agent", named)), one, one).per_turn == (0.0, 0.5)
    with pytest.raises(HarnessError, match="call 3, which earned the reward 0.25"):
        earned(trajectory, one, one, one)


def test_a_reply_in_another_form_is_the_same_and_a_summary_that_was_acted_on_earns() -> None:
    padded, act = (
        replace(CALLS, content=" I call\n", reasoning="Hm."),
        replace(SAYS, content="I go north, to the door."),
    )
    trajectory = asked(("agent", SAYS), ("compaction", act), ("agent", padded))
    assert earned(trajectory, replace(CALLS, content="I call")).per_turn == (0.0, 0.0, 0.25)
    assert earned(trajectory, act).per_turn == (0.0, 0.25, 0.0), "its label says nothing of who was answered"


def test_of_equal_replies_that_of_the_agent_that_was_answered_before_earns() -> None:
    yes = replace(SAYS, content="yes")
    acts = asked(("agent", yes), ("agent", yes), ("agent", yes))
    goes_on = replace(acts, segments=(*acts.segments[:2], replace(acts.segments[2], parent=0)))
    assert earned(goes_on, yes, replace(yes)).per_turn == (0.25, 0.0, 0.25), "the critic's word is its own"
    assert earned(acts, yes, acts.segments[2].message).per_turn == (0.25, 0.25, 0.0)


def test_what_is_no_reply_earns_for_no_turn_in_silence() -> None:
    trajectory = asked(("agent", replace(SAYS, content="I go north.")), ("agent", SAYS))
    with pytest.raises(HarnessError, match="(?s)env.step.*'I go north.'.*got 'north' in call 1.*reward 0.25"):
        earned(trajectory, replace(SAYS, content="north"))
    said, north = trajectory.segments[0].message, replace(SAYS, content="north")

    async def named() -> Score:
        env = GuardedEnv(PayingEachEnv)
        await env.open(toy_task(), None)
        await env.step(north, of=said)
        return env.with_turns(Score(reward=1.0), [trajectory])

    assert run_virtual(named())[0].per_turn == (0.25, 0.0), "the harness names the reply that it made that of"
    only = asked(("lost", SAYS), ("agent", replace(SAYS, content="I go north.")))
    assert earned(only, replace(SAYS, content="north")).per_turn == (0.25,), "there is one turn"
    assert earned(asked(("lost", SAYS)), SAYS) == Score(reward=1.0), "nothing was sampled that it could be of"


def test_the_answer_is_the_agents_whatever_its_client_asked_for_afterwards() -> None:
    said = [("agent", CALLS), ("agent", SAYS), ("lost", replace(SAYS, content="4")), ("auxiliary", CALLS)]
    trajectory = asked(*said, ("compaction", replace(SAYS, content="a summary")))
    assert final_text(trajectory) == "3"
    assert final_text(asked(("auxiliary", SAYS))) == ""


def test_a_score_that_says_so_itself_stands() -> None:
    score = played(SayingEnv, toy_task()).score
    assert score is not None and (score.per_turn, score.states) == ((0.0, 1.0), (None, "end"))


def test_a_world_that_says_nothing_of_turns_has_none() -> None:
    score = played(ToyEnv, toy_task()).score
    assert score is not None and score.per_turn is None and score.states is None


def test_a_reward_that_is_no_number_breaks_the_world() -> None:
    done = played(BrokenEnv, toy_task())
    assert done.rollout.outcome.kind == "infra_failed" and "finite" in str(done.rollout.outcome.failure)


@pytest.mark.parametrize("turns", [1, 2])
def test_what_is_said_of_turns_has_one_entry_per_sampled_turn(turns: int) -> None:
    done = played(PayingEnv, toy_task(limits=Limits(max_turns=turns)))
    assert done.score is not None
    sampled = sum(s.model is not None for s in done.rollout.trajectories[0].segments)
    assert sampled == turns and len(done.score.states or ()) == turns
