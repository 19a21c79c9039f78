"""Pairs of a policy's own rollouts: who is compared with whom, and where every token goes."""

import pytest
from segments import sampled

from sparring.algo.credit.pairs import Pairs
from sparring.batch.batches import assemble
from sparring.batch.flatten import flatten
from sparring.generation import Sampling
from sparring.types import Group, Outcome, Rollout, Score, Segment, Task, Trajectory

TASK = Task(id="t", env="e", messages=())
WARM = Sampling(temperature=0.5)
DONE = Outcome(kind="completed", reason="answered")


def group_of(rewards, *, answers=None):
    """Behind a prompt of two tokens, rollout n samples n + 1 tokens, and at `answers` [n] a second branch of those."""
    rollouts = []
    for n in range(len(rewards)):
        segments = [
            Segment(index=0, parent=None, source="prompt", tokens=(1, 2)),
            sampled(1, 0, range(10, 11 + n), sampling=WARM),
        ]
        if answers and n in answers:
            segments.append(sampled(2, 0, answers[n], sampling=WARM))
        trajectory = Trajectory(id=f"g/{n}", task="t", role="policy", segments=tuple(segments), outcome=DONE)
        rollouts.append(
            Rollout(id=f"g/{n}", task=TASK, index=n, attempt=0, purpose="train", trajectories=(trajectory,))
        )
    return Group(id="g", index=0, task=TASK, rollouts=tuple(rollouts), scores=tuple(Score(reward=r) for r in rewards))


def made(group):
    [batch] = assemble([group], flatten(group, "policy"), credit=Pairs(), model="policy", step=1)
    return batch


def test_the_best_is_compared_with_the_worst_and_no_token_is_lost():
    batch = made(group_of([0.5, 1.0, 0.0, 1.0, 0.0]))
    assert [(row.id, row.label) for row in batch.rows] == [("g/1#0", 1.0), ("g/2#0", -1.0)]
    assert [row.weights for row in batch.rows] == [
        {"preference": (0.0, 0.0, 0.25, 0.25)},
        {"preference": (0.0, 0.0, 0.5 / 3, 0.5 / 3, 0.5 / 3)},
    ]
    assert batch.denominators == {"preference": pytest.approx(1.0)}
    account = batch.account
    assert (account.sampled, account.trained, account.zero_advantage, account.filtered) == (15, 5, 10, 0)


def test_all_branches_of_a_rollout_belong_to_its_side_of_the_pair():
    batch = made(group_of([0.0, 1.0], answers={1: (20, 21)}))
    assert [(row.id, row.label) for row in batch.rows] == [("g/0#0", -1.0), ("g/1#0", 1.0), ("g/1#1", 1.0)]
    assert [max(row.weights["preference"]) for row in batch.rows] == [0.5, 0.125, 0.125]
    assert batch.account.trained == batch.account.sampled == 5


def test_a_group_of_equal_rewards_forms_no_pair():
    batch = made(group_of([1.0, 1.0, 1.0]))
    assert not batch.rows and not batch.denominators and batch.account.filtered == batch.account.sampled == 6


def test_a_reward_that_is_no_number_is_an_error():
    with pytest.raises(ValueError, match="expected finite rewards"):
        made(group_of([1.0, float("nan")]))
