"""What every credit rule owes beside its equation: members that are missing, prefixes that are shared, roles, refusals,
state."""

import copy
import json
import math
from dataclasses import replace

import msgspec
import pytest
from golden.credit import KINDS, REFERENCES, cases
from refusals import refused_at

from sparring.algo.base import name_of
from sparring.algo.credit.members import members
from sparring.algo.rules import CreditRule
from sparring.annotations import DECLARED
from sparring.batch.plain_groups import by_member, nouns, simple_group
from sparring.errors import BadInput
from sparring.types import Outcome, Score

RULES = sorted(REFERENCES)


def rule(name, **settings):
    return msgspec.convert({"name": name, **(KINDS[name].settings[0] if name in KINDS else {}), **settings}, CreditRule)


def advantages(name, groups, **settings):
    """Of each token of each member, in the order of time."""
    made, samples = nouns(groups)
    return by_member(groups, rule(name, **settings).open().credit(made, samples))


@pytest.mark.full
@pytest.mark.parametrize("name", RULES)
def test_a_failed_member_changes_nothing(name):
    for case in cases(name):
        without = [{**group, "failed": []} for group in case["groups"]]
        assert advantages(name, without) == advantages(name, [{**group, "failed": [9.0, -9.0]} for group in without])


ALONG_LINKS = {"gae", "gigpo", "optimal_token_baseline", "prime", "process", "turn_level"} | {
    "reinforce",
    "reinforce_plus_plus",
}
"""Rules that tell tokens or turns apart by what follows them."""


@pytest.mark.parametrize("name", sorted(set(RULES) - ALONG_LINKS))
def test_a_tree_is_credited_as_the_chat_that_sampled_the_same_tokens(name):
    """All branches are one sequence: prefixes that they share count once."""
    trees = 0
    for case in cases(name):
        chats = copy.deepcopy(case["groups"])
        for member in (m for group in chats for m in group["members"]):
            trees += member["follows"] != list(range(-1, len(member["turns"]) - 1))
            member["follows"] = list(range(-1, len(member["turns"]) - 1))
        assert advantages(name, chats) == advantages(name, case["groups"])
    assert trees > 5, "there must be trees among the cases"


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(set(RULES) - {"rae", "raft", "rejection"}))
def test_the_order_of_members_changes_no_bit(name):
    """The others are about order: a moving average, and the first of equals."""
    for case in cases(name):
        turned = [{**group, "members": group["members"][::-1]} for group in case["groups"]][::-1]
        back = [of if of is None else of[::-1] for of in advantages(name, turned)][::-1]
        assert back == advantages(name, case["groups"]), case["name"]


@pytest.mark.parametrize(
    "name", sorted({"opo", "rloo", "gpg", "maxrl", "gdpo", "pass_at_k", "prime", "optimal_token_baseline"})
)
def test_a_role_is_compared_with_itself_alone(name):
    [case] = [case for case in cases(name) if case["name"] == f"{name}/0/several_roles"]
    both = advantages(name, case["groups"])
    changed = copy.deepcopy(case["groups"])
    for member in (m for group in changed for m in group["members"] if m["role"] == "black"):
        member["reward"] = 1.0 - member["reward"] if name in ("maxrl", "pass_at_k", "gpg") else 2 * member["reward"]
    now = advantages(name, changed)
    white = [
        (g, m)
        for g, group in enumerate(changed)
        for m, member in enumerate(group["members"])
        if member["role"] == "white"
    ]
    if name != "gpg":  # its alpha is one number for the update
        assert all(both[g][m] == now[g][m] for g, m in white)
    assert (now != both) == (name != "gdpo")


ABSOLUTE = {"reinforce", "rae", "topr", "raft", "raft_plus_plus", "rejection", "remax"}
"""Rules that judge by an absolute yardstick."""


@pytest.mark.parametrize("name", sorted(set(RULES) - ABSOLUTE))
def test_equal_rewards_give_exact_zeros_or_drop_the_group(name):
    """0.1 three times has a rounded mean that is not 0.1."""
    tokens = {"value": [0.0], "implicit": [-1.0], "reference": [-1.0], "logprob": [-1.0], "probability_squares": [0.5]}
    fields = {"tokens": [tokens] * 3, "parts": [{"right": 0.1, "short": 0.1}] * 3, "per_turn": [[0.1]] * 3}
    [group] = advantages(name, [simple_group([0.1] * 3, states=[["hall"]] * 3, **fields)])
    assert group is None or all(value == 0.0 for member in group for value in member)


def test_turn_level_adds_the_last_turns_reward_to_the_outcome():
    """MT-GRPO (arXiv 2505.11821, version 1, section 4.2) takes from the reward what turns before the last earned, and
    no more."""
    high = 0.75**0.5  # (1 - 1/2) / sqrt(1/3): half of four are 1
    earned = [[0.0, 1.0], [0.0, 0.0], [0.0, 1.0], [0.0, 0.0]]
    two_turns = simple_group([1.0, 0.0, 1.0, 0.0], turns=(1, 1), per_turn=earned)
    expected = [pytest.approx([sign * high] * 2, rel=1e-5) for sign in (1, -1, 1, -1)]
    assert advantages("turn_level", [two_turns]) == [expected]
    one_turn = simple_group([1.0, 0.0, 1.0, 0.0], per_turn=[[1.0], [0.0], [1.0], [0.0]])
    assert advantages("turn_level", [one_turn]) == [[pytest.approx([sign * high], rel=1e-5) for sign in (1, -1, 1, -1)]]


def test_turn_level_counts_a_reward_models_last_turn():
    """It adds to the reward as well as to the turn. The world gave 0 to both, so outcomes are 0.25 and 0.75."""
    group = simple_group([1.25, 0.75], turns=(1, 1), per_turn=[[1.0, 0.25], [0.0, 0.75]])
    low = -(0.5**0.5)
    expected = [pytest.approx([0.0, low], abs=1e-5), pytest.approx([0.0, -low], abs=1e-5)]
    assert advantages("turn_level", [group]) == [expected]


@pytest.mark.parametrize("name", RULES)
def test_groups_too_small_to_compare_are_refused_by_name_before_the_run(name):
    least = rule(name).least_members
    rule(name).check(least, DECLARED)
    with refused_at("rollout.group_size", f"at least {least} rollouts to compare, with credit '{name}'"):
        rule(name).check(least - 1, DECLARED)
    if least > 1:
        [case] = [case for case in cases(name) if case["name"] == f"{name}/0/only_one_member"]
        # grpo keeps a lone member, at zero; and a state that one member visits twice can be compared
        zeros = [[[0.0] * sum(m["turns"]) for m in group["members"]] for group in case["groups"]]
        assert case["advantages"] == zeros if name == "grpo" else case["advantages"] == [None] or name == "gigpo"


def test_every_rule_has_vectors_and_a_name():
    assert {name_of(rule(name)) for name in RULES} == set(RULES)
    named = {kind.__struct_config__.tag for kind in CreditRule.__args__}
    assert named == set(RULES), "a rule without golden vectors"


def test_a_config_names_a_rule_with_its_settings():
    assert msgspec.convert({"name": "gae", "lambda_policy": 0.9}, CreditRule).lambda_policy == 0.9
    for wrong in (
        {"name": "glae"},
        {"name": "rloo", "epsilon": 1.0},
        {"name": "gae", "discount": 2.0},
        {"name": "gdpo", "weights": {}},
    ):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(wrong, CreditRule)
    bounds = (
        ("rae", "decay", 1.0),
        ("pass_at_k", "k", 0),
        ("raft", "best", 0),
        ("gae", "length_alpha", 0.0),
        ("rejection", "at_most", 0),
    )
    for name, key, value in bounds:
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert({"name": name, key: value}, CreditRule)
    assert msgspec.convert({"name": "rejection", "at_most": 1}, CreditRule).at_most == 1


@pytest.mark.parametrize(
    ("name", "missing", "said"),
    [
        ("gae", {"tokens": [{}] * 2}, "annotation 'value' on every sample"),
        ("prime", {"tokens": [{"reference": [0.0]}] * 2}, "annotation 'implicit' on every sample"),
        ("optimal_token_baseline", {"tokens": [{}] * 2}, "annotation 'probability_squares' on every sample"),
        ("turn_level", {}, "rewards per turn"),
        ("process", {}, "rewards per turn"),
        ("gigpo", {}, "states of their turns"),
        ("remax", {}, "a baseline rollout per task"),
    ],
)
def test_a_missing_input_of_a_rule_is_refused_by_name(name, missing, said):
    groups, samples = nouns([simple_group([1.0, 0.0], **missing)])
    with pytest.raises(BadInput, match=rf"credit '{name}'.*{said}"):
        rule(name).open().credit(groups, samples)


def test_a_failed_policys_score_may_lack_parts_turns_and_states():
    """Its reward stands for every part; its turns earned nothing."""
    parts = [{"right": 1.0, "short": 0.0}, {}]
    broken = [simple_group([0.5, -1.0], parts=parts)]
    said = [simple_group([0.5, -1.0], parts=[parts[0], {"right": -1.0, "short": -1.0}])]
    assert advantages("gdpo", broken) == advantages("gdpo", said)
    groups, samples = nouns([simple_group([1.0, -1.0], per_turn=[[0.5], [0.0]], states=[["hall"], ["hall"]])])
    alone = replace(groups[0], scores=(groups[0].scores[0], Score(reward=-1.0)))
    for name in ("process", "turn_level"):
        assert rule(name).credit([alone], samples) == rule(name).credit(groups, samples)
    assert rule("gigpo").credit([alone], samples)[0]


@pytest.mark.parametrize("name", ["gigpo", "process", "turn_level"])
def test_an_update_of_failed_rollouts_alone_is_not_refused(name):
    """Its scores say nothing of turns and states, as every score of a broken rollout."""
    groups, samples = nouns([simple_group([0.0, 0.0])])
    broken = Outcome(kind="policy_failed", reason="malformed")
    rollouts = [
        replace(rollout, trajectories=tuple(replace(t, outcome=broken) for t in rollout.trajectories))
        for rollout in groups[0].rollouts
    ]
    [rows] = rule(name).credit([replace(groups[0], rollouts=tuple(rollouts))], samples)
    assert all(not any(row.advantages) for row in rows)


HIGH = 0.5**0.5
"""(1 - 1/2) / sqrt(1/2), of two values 1 apart."""


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        # a gate that one member did not pass: what lies behind is worth 0 to it; both parts are then 1 apart
        ([{"right": 1.0, "short": 1.0}, {"short": 0.0}], [HIGH, -HIGH]),
        # of another domain: nobody has it, and the other part alone decides
        ([{"short": 0.0}, {"short": 1.0}], [-HIGH, HIGH]),
        # nobody passed: nobody is better
        ([{"short": 0.0}, {"short": 0.0}], [0.0, 0.0]),
        # parts without a weight do not count
        ([{"other": 0.0}, {"other": 1.0}], [0.0, 0.0]),
        # it broke its world: its reward, 0, stands in the place of the part that the other has, and of no other
        ([{"short": 1.0}, {}], [HIGH, -HIGH]),
    ],
)
def test_gdpo_computes_gated_and_routed_parts(parts, expected):
    """Two members; the weighted sums are normalised once more, so that any difference becomes 1 / sqrt(2)."""
    found = advantages("gdpo", [simple_group([0.0, 0.0], parts=parts)], weights={"right": 2.0, "short": 1.0})
    assert found == [[pytest.approx([value], abs=1e-5) for value in expected]]


@pytest.mark.parametrize("name", sorted(set(RULES) - ABSOLUTE))
def test_rewards_that_differ_by_rounding_are_equal(name):
    """0.1 + 0.2 is not 0.3; neither are sums that cancel to some 1e-17 in the place of 0."""
    tokens = {"value": [0.0], "implicit": [-1.0], "reference": [-1.0], "logprob": [-1.0], "probability_squares": [0.5]}
    for odd, even in ((0.1 + 0.2, 0.3), (0.3 - 0.1 - 0.2, 0.0) if not rule(name).needs_nonnegative_rewards else (1, 1)):
        rewards = [odd, even, even, even]
        fields = {"parts": [{"right": r, "short": r} for r in rewards], "per_turn": [[r] for r in rewards]}
        group = simple_group(rewards, states=[["hall"]] * 4, tokens=[tokens] * 4, **fields)
        for settings in ({}, {"divide": True})[: 2 if name == "gpg" else 1]:
            [found] = advantages(name, [group], **settings)
            assert found is None or all(value == 0.0 for member in found for value in member)
        assert rule(name).says_nothing(rewards)


def test_a_token_gets_the_rewards_of_its_step_and_later_ones():
    """Turns of four tokens and two: steps behind the second and the fourth, none in the second turn, whose tokens get
    nothing."""
    group = simple_group([1.0], turns=(4, 2), per_turn=[[1.0, 0.0]], per_step=[[[[2, 1.0], [4, 0.0]], []]])
    half = 0.5**0.5
    assert advantages("process", [group]) == [[pytest.approx([0.0, 0.0, -half, -half, 0.0, 0.0], abs=1e-5)]]
    assert advantages("reinforce", [group], discount=1.0) == [[[1.0, 1.0, 0.0, 0.0, 0.0, 0.0]]], (
        "a reward is where it was earned"
    )


@pytest.mark.parametrize("ends", [[0], [3], [2, 1], [1, 1]])
def test_steps_outside_their_turn_are_an_error(ends):
    group = simple_group([1.0], turns=(2,), per_turn=[[0.0]], per_step=[[[[end, 0.0] for end in ends]]])
    with pytest.raises(ValueError, match="steps end at"):
        advantages("process", [group])


def test_a_group_with_a_failed_baseline_leaves_the_update():
    [group], samples = nouns([{**simple_group([1.0, 0.0]), "failed": [0.0]}])
    lost = replace(group, failed=tuple(replace(rollout, purpose="baseline") for rollout in group.failed))
    assert rule("remax").credit([lost], samples) == [[]]


def test_maxrl_refuses_negative_rewards():
    with pytest.raises(ValueError, match="at least 0"):
        advantages("maxrl", [simple_group([1.0, -1.0])])


def test_moving_averages_go_on_exactly_where_they_stopped():
    [case] = [case for case in cases("rae") if case["name"] == "rae/0/several_roles"]
    groups, samples = nouns(case["groups"])
    whole = rule("rae").open().credit(groups, samples)
    first = rule("rae").open()
    before = first.credit(groups[:1], samples[:1])
    second = rule("rae").open()
    second.restore(json.loads(json.dumps(first.state())))
    assert before + second.credit(groups[1:], samples[1:]) == whole


def test_rewards_must_be_finite_and_turns_must_be_the_trajectorys():
    for broken in (
        Score(reward=math.nan),
        Score(reward=1.0, per_turn=(1.0, 2.0)),
        Score(reward=1.0, states=("a", "b")),
    ):
        [group], samples = nouns([simple_group([1.0, 0.0])])
        group = replace(group, scores=(broken, group.scores[1]))
        with pytest.raises(ValueError, match="finite|for 1 sampled turns"):
            for member in members(group, samples[0]):
                member.step_rewards(1.0), member.states()
    [group], samples = nouns(next(iter(c["groups"] for c in cases("rloo") if c["name"].endswith("several_roles")))[:1])
    with pytest.raises(ValueError, match="expected per_role_turns"):
        members(replace(group, scores=tuple(replace(s, per_turn=(1.0,)) for s in group.scores)), samples[0])
    with pytest.raises(ValueError, match="none of its trajectories"):
        members(group, [replace(samples[0][0], id="elsewhere#0")])


def test_turn_rewards_are_part_of_the_reward():
    """Two turns of 2 and 1 tokens that earned 0.25 and 0.5 of a reward of 1: what is left, 0.25, came at the end."""
    [group], [rows] = nouns(
        [simple_group([1.0], turns=(2, 1), per_turn=[[0.25, 0.5]], tokens=[{"reward": [0.0, -0.1, 0.0]}])]
    )
    [member] = members(group, rows)
    assert member.step_rewards(1.0) == pytest.approx([0.0, 0.15, 0.75])
    assert member.reward == pytest.approx(0.9)
    assert math.fsum(member.step_rewards(1.0)) == pytest.approx(member.reward)


def test_a_role_without_peers_gets_zero_in_a_group_with_others():
    with_states = simple_group([0.0, 1.0], states=[["s"], ["s"]])
    roles = simple_group([0.0, 1.0])
    alone = {**roles["members"][0], "role": "black"}
    groups, samples = nouns([with_states, {**roles, "members": [roles["members"][0], alone, roles["members"][1]]}])
    _, credited = rule("gigpo").credit(groups, samples)
    by_role = {row.id: row.advantages[-1] for row in credited}
    assert len(by_role) == 3 and sum(value == 0.0 for value in by_role.values()) == 1
    assert sorted(by_role.values()) == pytest.approx([-(0.5**0.5), 0.0, 0.5**0.5], abs=1e-5)


@pytest.mark.parametrize("name", sorted(KINDS))
def test_a_role_without_turns_gets_no_credit(name):
    """Cut before its first token: a member without turns."""
    case = next(iter(cases(name)))
    groups = copy.deepcopy(case["groups"])
    for member in groups[0]["members"][:1]:
        member.update({"turns": [], "follows": [], "tokens": {key: [] for key in member.get("tokens", {})}})
        member.update({key: [] for key in ("per_turn", "states") if member.get(key) is not None})
    made, samples = nouns(groups)
    credited = rule(name, **case["settings"]).open().credit(made, samples)
    silent = made[0].rollouts[0].trajectories[0].id
    assert not any(row.id.startswith(f"{silent}#") for rows in credited for row in rows)
