"""What stands around a credit rule: shaping before it, filters, the shuffled control, its state, and what the run is
refused for."""

from dataclasses import replace

import msgspec
import pytest

from sparring.algo.config import AlgoConfig, named
from sparring.algo.pipeline import load_credit
from sparring.algo.presets import ALGORITHMS
from sparring.batch.plain_groups import by_member, nouns, simple_group
from sparring.errors import BadInput


def config(**algo):
    return msgspec.convert(named(algo), AlgoConfig, strict=True)


def advantages(plain, algo):
    groups, samples = nouns(plain)
    return by_member(plain, load_credit(algo, seed=0).credit(groups, samples))


EQUAL = [simple_group([1.0, 1.0]), simple_group([1.0, 0.0])]


@pytest.mark.parametrize(
    "credit", ["grpo", "rloo", "maxrl", "opo", "reinforce_plus_plus", "reinforce", "raft_plus_plus", "gpg"]
)
def test_groups_of_equal_rewards_leave_where_the_filter_is_on(credit):
    assert advantages(EQUAL, config(credit=credit))[0] is not None
    assert advantages(EQUAL, config(credit=credit, zero_variance_filter=True))[0] is None


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_filter_is_on_in_the_presets_of_dapo_alone(name):
    assert config(preset=name).zero_variance_filter == (name in ("dapo", "top_entropy"))
    assert not config(preset=name, zero_variance_filter=False).zero_variance_filter


@pytest.mark.parametrize("rewards", [[1.0] * 6, [0.0] * 6, [1.0] * 3 + [0.0] * 3, [0.9, 0.7, 0.6, 0.8, 0.0, 0.0]])
def test_pass_at_k_groups_with_equal_subsets_are_flat(rewards):
    """Of six, three or fewer failures: every four hold a success."""
    groups = [simple_group(rewards), simple_group([1.0, 0.0, 0.0, 0.0, 0.0, 0.0])]
    kept = advantages(groups, config(credit="pass_at_k"))
    assert kept[0] == [[0.0]] * 6 and kept[1][0] != [0.0]
    assert advantages(groups, config(credit="pass_at_k", zero_variance_filter=True)) == [None, kept[1]]


def test_equal_rewards_are_equal_role_by_role():
    """Players of a zero-sum game earn 1 and -1 in every rollout: nobody's reward differs from rollout to rollout."""
    members = [
        {**m, "role": role} for role, r in (("white", 1.0), ("black", -1.0)) for m in simple_group([r, r])["members"]
    ]
    game = {**simple_group([]), "members": sorted(members, key=lambda m: m["rollout"])}
    assert advantages([game], config(credit="rloo", zero_variance_filter=True)) == [None]
    won = [{**m, "reward": -m["reward"]} if m["rollout"] else m for m in game["members"]]
    assert advantages([{**game, "members": won}], config(credit="rloo", zero_variance_filter=True)) == [
        [[2.0], [-2.0], [-2.0], [2.0]]
    ]


def test_shaping_comes_before_credit_in_its_order_and_can_make_equal_rewards_differ():
    group = simple_group([1.0, 1.0], lengths=(1, 3))
    price = {"name": "linear_length", "price": 0.25, "by_success": False}
    assert advantages([group], config(credit="rloo", shaping=[price])) == [[[0.5], [-0.5] * 3]]
    again = [price, {"name": "relative_length", "solved_above": 0.5}]  # 0.75 + 0.5 and 0.25 - 0.5
    assert advantages([group], config(credit="rloo", shaping=again)) == [[[1.5], [-1.5] * 3]]


def test_difficulty_is_judged_before_shaping():
    price = {"name": "linear_length", "price": 1.0, "by_success": False}
    algo = config(credit="reinforce", difficulty={"lowest": 0.0, "highest": 0.9}, shaping=[price])
    assert advantages([simple_group([1.0, 1.0]), simple_group([1.0, 0.0])], algo) == [None, [[0.0], [-1.0]]]


def test_the_shuffled_control_works_where_turns_earn_and_passes_state_on():
    turns = {"turns": [[1], [1, 1]], "follows": [[-1], [-1, 0]]}
    members = [
        {**m, "turns": t, "follows": f}
        for m, t, f in zip(simple_group([1.0, 0.0])["members"], *turns.values(), strict=True)
    ]
    plain = [{**simple_group([]), "members": [{**m, "per_turn": [0.5] * len(m["turns"])} for m in members]}]
    first = advantages(plain, config(credit="reinforce", control="shuffled"))
    assert sorted(member[0] for member in first[0]) == [0.0, 1.0], "all of it at the end"
    groups, samples = nouns(plain)
    credit = load_credit(config(credit="rae", control="shuffled"), seed=0)
    credit.credit(groups, samples)
    other = load_credit(config(credit="rae", control="shuffled"), seed=0)
    other.restore(credit.state())
    assert other.state() == credit.state() != load_credit(config(credit="rae"), seed=0).state()
    assert load_credit(config(), seed=0).state() == {}


def test_annotations_and_group_size_are_checked_before_the_run():
    everything = {"value", "implicit", "reference", "probability_squares"}
    for algo, size, written, said in (
        (config(credit="gae"), 8, set(), "algo.credit: expected a credit that does not need the annotation 'value'"),
        (config(credit="prime"), 8, {"reference"}, "annotation 'implicit'"),
        (config(credit="optimal_token_baseline"), 8, {"value"}, "annotation 'probability_squares'"),
        (config(), 1, everything, "rollout.group_size: expected at least 2"),
        (config(credit={"name": "pass_at_k", "k": 4}), 3, everything, "rollout.group_size: expected at least 4"),
        (
            config(credit="reinforce", zero_variance_filter=True),
            1,
            everything,
            "algo.zero_variance_filter: expected false with rollout.group_size = 1",
        ),
    ):
        with pytest.raises(BadInput, match=said):
            algo.check(size, written)
    for credit in ("gae", "prime", "remax", "optimal_token_baseline", "rae", "reinforce_plus_plus"):
        algo = config(credit=credit)
        algo.check(max(1, algo.credit.least_members), everything)


def test_right_answers_are_imitated_whatever_shaping_makes_of_them():
    price = {"name": "linear_length", "price": 1.0, "by_success": False}
    algo = config(credit="reinforce", aggregation="sequence_mean", shaping=[price], right_answers={})
    groups, samples = nouns([simple_group([1.0, 0.0], turns=(2, 1)), simple_group([1.0])])
    credited = load_credit(algo, seed=0).credit(groups, samples)
    assert [[sum(row.weights.get("imitate", ())) for row in rows] for rows in credited] == [[3.0, 0], [1.0]]
    first = credited[0][0].weights
    assert [weight != 0 for weight in first["policy"]] == [weight == 1 for weight in first["imitate"]]
    alone = load_credit(config(right_answers={}, zero_variance_filter=True), seed=0).credit(groups, samples)
    assert [len(rows) for rows in alone] == [2, 0], "a group that leaves teaches nothing"


def test_right_is_the_scorers_success_or_a_roles_own_reward():
    groups, samples = nouns([simple_group([1.0, 0.0])])
    algo = config(credit="reinforce", right_answers={})

    def imitated(*scores):
        [rows] = load_credit(algo, seed=0).credit([replace(groups[0], scores=scores)], samples)
        return ["imitate" in row.weights for row in rows]

    wrong, right = groups[0].scores[::-1]
    assert imitated(replace(wrong, success=True), replace(right, success=False)) == [True, False]
    assert imitated(replace(wrong, success=True, per_role={"policy": 0.0}), right) == [False, True]
    with pytest.raises(msgspec.ValidationError, match="coefficient must be above 0"):
        config(right_answers={"coefficient": 0.0})


def test_rules_over_a_whole_update_do_not_see_one_group():
    for credit in ("grpo", "rloo", "gigpo", "raft"):
        assert config(credit=credit).sees_one_group
    for algo in (config(credit="gpg"), config(credit="rae"), config(kl_reward={}), config(control="shuffled")):
        assert not algo.sees_one_group


def test_a_reference_is_computed_only_if_something_reads_it():
    assert not config().needs_reference
    assert config(kl_reward={}).needs_reference and config(credit="prime").needs_reference
    assert config(kl={"coefficient": 0.1}).needs_reference


def test_the_order_of_groups_does_not_affect_which_stay():
    groups, samples = nouns(EQUAL)
    credit = load_credit(config(zero_variance_filter=True), seed=0)
    forwards, backwards = credit.credit(groups, samples), credit.credit(groups[::-1], samples[::-1])
    assert forwards == backwards[::-1] and [bool(rows) for rows in forwards] == [False, True]
    lost = replace(groups[0], rollouts=(), scores=())
    assert credit.credit([lost, groups[1]], [[], samples[1]])[0] == []
