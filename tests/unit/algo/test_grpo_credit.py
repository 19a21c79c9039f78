"""Advantages, weights and the shuffled control, on groups small enough to compute by hand."""

import math
from dataclasses import replace

import pytest

from sparring.algo.config import AlgoConfig
from sparring.algo.correction.rule import Correction
from sparring.algo.credit.grpo import Grpo
from sparring.algo.credit.shuffled import Shuffled
from sparring.algo.gate.clip import Clip
from sparring.algo.pipeline import CreditPipeline, load_credit
from sparring.types import Group, Outcome, Rollout, Sample, Score, Task, Trajectory

TASK = Task(id="t", env="e", messages=())
DONE = Outcome(kind="completed", reason="answered")


def make_group(name, rewards, index=0):
    rollouts = tuple(
        Rollout(
            id=f"{name}-{i}",
            task=TASK,
            index=i,
            attempt=0,
            purpose="train",
            trajectories=(Trajectory(id=f"{name}-{i}", task="t", role="policy", segments=(), outcome=DONE),),
        )
        for i in range(len(rewards))
    )
    return Group(id=name, index=index, task=TASK, rollouts=rollouts, scores=tuple(Score(reward=r) for r in rewards))


def make_rows(group, lengths):
    """One row per rollout: a prompt token, then `length` sampled ones."""
    return [
        Sample(
            id=f"{rollout.id}#0",
            group=group.id,
            source="policy",
            tokens=(1,) * (length + 1),
            weights={"policy": (0.0, *[1.0] * length)},
        )
        for rollout, length in zip(group.rollouts, lengths, strict=True)
    ]


def advantages(rows):
    return [row.advantages[-1] for row in rows]


def test_standard_advantages_divide_by_the_deviation_of_the_group():
    group = make_group("g", [1.0, 0.0, 0.0, 1.0, 0.0])
    [rows] = Grpo(epsilon=1e-6).credit([group], [make_rows(group, [2] * 5)])
    deviation = math.sqrt((2 * 0.6**2 + 3 * 0.4**2) / 4)
    assert advantages(rows) == pytest.approx([x / (deviation + 1e-6) for x in (0.6, -0.4, -0.4, 0.6, -0.4)], rel=1e-12)
    assert all(row.advantages[0] == 0.0 for row in rows), "the prompt has no advantage"


def test_unnormalised_advantages_are_only_centred():
    group = make_group("g", [3.0, 1.0])
    [rows] = Grpo(normalise=False).credit([group], [make_rows(group, [1, 1])])
    assert advantages(rows) == [1.0, -1.0]


def test_a_group_without_variance_leaves_the_update_or_gets_exact_zeros():
    group = make_group("g", [0.1, 0.1, 0.1])
    rows = make_rows(group, [1, 1, 1])
    assert list(load_credit(AlgoConfig(zero_variance_filter=True), seed=0).credit([group], [rows])) == [[]]
    [kept] = load_credit(AlgoConfig(), seed=0).credit([group], [rows])
    assert advantages(kept) == [0.0, 0.0, 0.0]
    alone = make_group("h", [1.0])
    [kept] = load_credit(AlgoConfig(), seed=0).credit([alone], [make_rows(alone, [1])])
    assert advantages(kept) == [0.0]


def test_token_mean_leaves_weights_and_sequence_mean_gives_each_trajectory_one():
    group = make_group("g", [1.0, 0.0])
    rows = make_rows(group, [4, 2])
    [by_token] = load_credit(AlgoConfig(), seed=0).credit([group], [rows])
    assert [row.weights for row in by_token] == [row.weights for row in rows]
    [by_sequence] = load_credit(AlgoConfig(aggregation="sequence_mean"), seed=0).credit([group], [rows])
    assert by_sequence[0].weights["policy"] == (0.0, 0.25, 0.25, 0.25, 0.25)
    assert by_sequence[1].weights["policy"] == (0.0, 0.5, 0.5)


def test_sequence_mean_counts_a_trajectory_once_over_its_branches():
    group = make_group("g", [1.0, 0.0])
    first, second = make_rows(group, [3, 2])
    branch = replace(first, id="g-0#1", weights={"policy": (0.0, 0.0, 0.0, 1.0)})
    [rows] = load_credit(AlgoConfig(aggregation="sequence_mean"), seed=0).credit([group], [[first, branch, second]])
    assert sum(rows[0].weights["policy"]) + sum(rows[1].weights["policy"]) == 1.0
    assert rows[0].advantages[-1] == rows[1].advantages[-1]


def test_rewards_must_be_finite_and_rows_must_belong():
    group = make_group("g", [1.0, math.nan])
    with pytest.raises(ValueError, match="finite"):
        load_credit(AlgoConfig(), seed=0).credit([group], [make_rows(group, [1, 1])])
    group, other = make_group("g", [1.0, 0.0]), make_group("other", [1.0, 0.0])
    with pytest.raises(ValueError, match="none of its trajectories"):
        load_credit(AlgoConfig(), seed=0).credit([group], [make_rows(other, [1, 1])])


class Recording:
    """A credit that keeps the rewards it was shown."""

    def __init__(self):
        self.seen = []

    def denominator(self, rows):
        return None

    def credit(self, groups, samples):
        self.seen.append([score.reward for group in groups for score in group.scores])
        return samples


def test_shuffled_permutes_rewards_across_groups_and_repeats_itself():
    groups = [make_group(f"g{i}", [float(4 * i + j) for j in range(4)], index=i) for i in range(8)]
    rows = [make_rows(group, [1] * 4) for group in groups]
    recording = Recording()
    Shuffled(recording, seed=1).credit(groups, rows)
    Shuffled(recording, seed=1).credit(groups, rows)
    Shuffled(recording, seed=2).credit(groups, rows)
    first, again, other = recording.seen
    assert sorted(first) == [float(i) for i in range(32)] != first
    assert again == first != other
    assert any(int(reward) // 4 != place // 4 for place, reward in enumerate(first)), (
        "some reward must change its group"
    )
    Shuffled(recording, seed=1).credit([replace(g, index=g.index + 8) for g in groups], rows)
    assert recording.seen[-1] != first, "another update is permuted another way"


def test_config_selects_the_control_and_refuses_nonsense():
    assert isinstance(load_credit(AlgoConfig(control="shuffled"), seed=0), Shuffled)
    assert isinstance(load_credit(AlgoConfig(), seed=0), CreditPipeline)
    nonsense = [
        (Grpo, {"epsilon": 0.0}),
        (Clip, {"low": 0.0}),
        (Clip, {"low": 0.3, "high": 0.2}),
        (Correction, {"high": 0.5}),
    ]
    for kind, settings in nonsense:
        with pytest.raises(ValueError):
            kind(**settings)


def test_a_constant_divides_by_one_length_and_by_the_number_of_trajectories():
    group = make_group("g", [1.0, 0.0])
    credit = load_credit(AlgoConfig(aggregation="constant"), seed=0, max_tokens=10)
    [rows] = credit.credit([group], [make_rows(group, [4, 2])])
    assert rows[0].weights["policy"] == (0.0, 0.1, 0.1, 0.1, 0.1) and credit.denominator(rows) == 2.0
    assert load_credit(AlgoConfig(aggregation="sequence_sum"), seed=0).denominator(rows[:1]) == 1.0
    assert load_credit(AlgoConfig(), seed=0).denominator(rows) is None


def test_token_rewards_count_in_addition_to_the_outcome():
    group = make_group("g", [1.0, 0.5])
    rows = make_rows(group, [2, 1])
    rows[0] = replace(rows[0], annotations={"reward": (0.0, -0.5, -0.25)})
    [first, second] = Grpo(normalise=False).credit([group], [rows])[0]
    assert (first.advantages[1], second.advantages[1]) == (-0.125, 0.125)
