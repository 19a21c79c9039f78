"""A process reward model's say on every turn: which texts it is asked about, and what becomes of the score."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any

import pytest
from refusals import refused_at
from segments import sampled

from sparring.rollout.scorers.turn_scorer import TurnScorer
from sparring.types import Outcome, Rollout, Score, Segment, Task, Trajectory

DONE = Outcome(kind="completed", reason="answered")
TASK = Task(id="t", env="e", messages=())


class Table:
    """A scalar head whose value is the sum of what each token is worth; remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[Sequence[int]] = []

    async def values(self, texts: Sequence[Sequence[int]]) -> list[float]:
        self.asked += texts
        return [float(sum(text)) for text in texts]

    async def close(self) -> None:
        """Nothing is held."""


def context(index: int, parent: int | None, *tokens: int) -> Segment:
    return Segment(index=index, parent=parent, source="tool", tokens=tokens)


def turn(index: int, parent: int, *tokens: int) -> Segment:
    return sampled(index, parent, tokens)


def rollout(*roles: tuple[Segment, ...]) -> Rollout:
    told = tuple(
        Trajectory(id=f"r/{number}", task="t", role=f"role {number}", segments=segments, outcome=DONE)
        for number, segments in enumerate(roles)
    )
    return Rollout(id="r", task=TASK, index=0, attempt=0, purpose="train", trajectories=told)


def scored(
    rollouts: Sequence[Rollout], scores: Sequence[Score], **settings: Any
) -> tuple[list[Score], list[Sequence[int]]]:
    model = Table()
    return asyncio.run(TurnScorer(model, **settings).score(TASK, rollouts, scores)), model.asked


def test_every_turn_is_read_up_to_its_end_in_its_own_context() -> None:
    chat = rollout((context(0, None, 1, 2), turn(1, 0, -4), context(2, 1, 3), turn(3, 2, 1, -2)))
    tree = rollout((context(0, None, 1, 2), turn(1, 0, -3), turn(2, 1), turn(3, 0, -1, -2)))
    given = [Score(reward=1.0, parts={"format": 1.0}, success=True, per_turn=(0.25, 0.0)), Score(reward=None)]
    found, asked = scored([chat, tree], given, weight=0.5)
    assert asked == [(1, 2, -4), (1, 2, -4, 3, 1, -2), (1, 2, -3), (1, 2, -1, -2)]
    low, high, even = 1 / (1 + math.e), math.e / (1 + math.e), 0.5
    assert found[0].per_turn == pytest.approx((0.25 + low / 2, high / 2)) and found[0].reward == pytest.approx(1.5)
    assert found[0].parts == {"format": 1.0, "reward_model": pytest.approx(0.5)} and found[0].success
    assert found[1].per_turn == pytest.approx((even / 2, even / 2)) and found[1].reward == pytest.approx(0.5)


def test_steps_are_judged_at_their_own_ends() -> None:
    """Of the first turn behind the first token and the third of four, to which the fourth belongs; the world had paid
    for the end of the second turn, which has one step; the third has none."""
    ends = {(5, -6, 2, 9): [1, 3], (-3, 1): [2], (7,): []}
    turns = (turn(1, 0, 5, -6, 2, 9), context(2, 1, 3), turn(3, 2, -3, 1), turn(4, 3, 7))
    given = Score(reward=1.0, per_turn=(0.0, 0.5, 0.0), per_step=((), ((2, 0.5),), ()))
    [score], asked = scored(
        [rollout((context(0, None, 1), *turns))], [given], weight=2.0, steps=lambda tokens: ends[tuple(tokens)]
    )
    assert asked == [(1, 5), (1, 5, -6, 2), (1, 5, -6, 2, 9, 3, -3, 1)]
    first, second, third = (1 / (1 + math.exp(-value)) for value in (6, 2, 12))
    assert score.per_step == (
        ((1, pytest.approx(2 * first)), (4, pytest.approx(2 * second))),
        ((2, pytest.approx(0.5 + 2 * third)),),
        (),
    )
    assert score.per_turn == pytest.approx((2 * (first + second), 0.5 + 2 * third, 0.0))
    assert score.reward == pytest.approx(1 + 2 * (first + second + third))
    assert score.parts["reward_model"] == pytest.approx((first + second + third) / 3)


def test_what_turns_leave_is_what_the_world_gave() -> None:
    [score], _ = scored([rollout((context(0, None, 1), turn(1, 0, 700), turn(2, 1, -1500)))], [Score(reward=0.75)])
    assert score.per_turn == (1.0, 0.0), "a value however large"
    assert score.reward == 1.75


def test_who_never_spoke_earned_nothing() -> None:
    [score], asked = scored([rollout((context(0, None, 1),))], [Score(reward=0.5)])
    assert (score, asked) == (Score(reward=0.5, per_turn=()), [])


def test_rewards_of_other_turns_than_were_sampled_are_the_worlds_mistake() -> None:
    with refused_at("rollout r", "rewards"):
        scored([rollout((context(0, None, 1), turn(1, 0, 2)))], [Score(reward=0.0, per_turn=(0.0, 1.0))])


def test_turns_of_several_roles_are_refused() -> None:
    both = ((context(0, None, 1), turn(1, 0, 2)),) * 2
    with refused_at("rl.reward_by", "a world"):
        scored([rollout(*both)], [Score(reward=0.0)])
