"""From scored groups to batches: every sampled token is trained once or accounted for by name."""

import asyncio
import math
from dataclasses import replace

import msgspec
import pytest
from segments import sampled

from sparring.algo.config import AlgoConfig, named
from sparring.algo.credit.pairs import Pairs
from sparring.algo.pipeline import load_credit
from sparring.batch.batches import Plan, assemble, batches
from sparring.batch.critic import value_rows
from sparring.batch.flatten import flatten
from sparring.errors import SparringError
from sparring.generation import Runs, Sampling
from sparring.types import Failure, Fork, Group, Outcome, Rollout, Score, Segment, Task, TokenAccount, Trajectory

TASK = Task(id="t", env="e", messages=())
DONE = Outcome(kind="completed", reason="answered")
BROKEN = Outcome(
    kind="infra_failed", reason="failure", failure=Failure(error="SandboxError", where="box", message="gone")
)


def given_tokens(index, parent, tokens):
    return Segment(index=index, parent=parent, source="tool", tokens=tokens)


def policy_segment(index, parent, tokens, *, model="policy", version=0, **how):
    return sampled(
        index,
        parent,
        tokens,
        version=version,
        model=model,
        logprobs=tuple(-0.1 * token for token in tokens),
        kv_versions=Runs.of(version, len(tokens)),
        sampling=Sampling(**how),
    )


def make_rollout(id, index, segments, outcome=DONE, purpose="train"):
    trajectory = Trajectory(id=id, task="t", role="policy", segments=tuple(segments), outcome=outcome)
    return Rollout(id=id, task=TASK, index=index, attempt=0, purpose=purpose, trajectories=(trajectory,))


def make_group(name, rewards, *, index=0, length=2, failed=0):
    """Rollouts of a prompt of two tokens and `length` sampled ones; `failed` more that an infrastructure failure
    took."""
    segments = [given_tokens(0, None, (1, 2)), policy_segment(1, 0, tuple(range(3, 3 + length)))]
    rollouts = tuple(make_rollout(f"{name}-{i}", i, segments) for i in range(len(rewards)))
    lost = tuple(make_rollout(f"{name}-lost{i}", i, segments, BROKEN) for i in range(failed))
    scores = tuple(Score(reward=reward) for reward in rewards)
    return Group(id=name, index=index, task=TASK, rollouts=rollouts, scores=scores, failed=lost)


class Centred:
    """A credit as plain as can be: reward minus the group's mean; no variance, no group."""

    def denominator(self, rows):
        return None

    def credit(self, groups, samples):
        return [self._group(group, rows) for group, rows in zip(groups, samples, strict=True)]

    def _group(self, group, rows):
        rewards = [score.reward for score in group.scores]
        if len(set(rewards)) < 2:
            return []
        mean = sum(rewards) / len(rewards)
        return [
            replace(row, advantages=tuple(reward - mean for _ in row.tokens))
            for row, reward in zip(rows, rewards, strict=True)
        ]


def group_of(*segments_of, **how):
    """A group of a rollout for each list of segments, the first with the best score."""
    rollouts = tuple(make_rollout(f"r{n}", n, segments, **how) for n, segments in enumerate(segments_of))
    scores = tuple(Score(reward=-float(n)) for n in range(len(rollouts)))
    return Group(id="g", index=0, task=TASK, rollouts=rollouts, scores=scores)


def collect(groups, **options):
    """Every batch of the first update, if nothing else is said."""
    return [batch for batch, _ in collect_as_taken(groups, **options)]


def collect_as_taken(groups, **options):
    """Every batch, with the number of groups taken when it came."""
    taken = []

    async def source():
        for group in groups:
            taken.append(group.id)
            yield group

    async def run():
        settings = {"steps": [1], "groups_per_step": len(groups), "credit": Centred(), "model": "policy", **options}
        return [(batch, len(taken)) async for batch in batches(source(), **settings)]

    return asyncio.run(run())


def forked_trajectory():
    """A tree: prompt, a first turn shared by two branches, then an edit that makes another second turn."""
    return [
        given_tokens(0, None, (1, 2)),
        policy_segment(1, 0, (3, 4)),
        given_tokens(2, 1, (5,)),
        policy_segment(3, 2, (6, 7)),
        given_tokens(4, 1, (8,)),
        policy_segment(5, 4, (9,)),
        given_tokens(6, 1, (10,)),
    ]


def test_a_forked_tree_trains_each_sampled_token_once():
    first, second = flatten(group_of(forked_trajectory()), "policy")
    assert (first.id, second.id) == ("r0#0", "r0#1"), "the branch that ends in a tool's words alone is left out"
    assert first.tokens == (1, 2, 3, 4, 5, 6, 7)
    assert first.weights["policy"] == (0, 0, 1, 1, 0, 1, 1)
    assert first.logprobs == pytest.approx((0, 0, -0.3, -0.4, 0, -0.6, -0.7))
    assert first.versions == first.kv_versions == (-1, -1, 0, 0, -1, 0, 0)
    assert second.tokens == (1, 2, 3, 4, 8, 9)
    assert second.weights["policy"] == (0, 0, 0, 0, 0, 1), "the shared turn already has its weight in the first branch"
    assert second.logprobs == pytest.approx((0, 0, 0, 0, 0, -0.9))


def test_tokens_of_another_model_are_context():
    segments = [
        given_tokens(0, None, (1,)),
        policy_segment(1, 0, (2,), model="judge"),
        policy_segment(2, 1, (3,), temperature=0.7),
    ]
    group = group_of(segments)
    [row] = flatten(group, "policy")
    assert (row.weights["policy"], row.temperature) == ((0, 0, 1), 0.7)
    [row] = flatten(group, "judge")
    assert row.weights["policy"] == (0, 1, 0)
    assert flatten(group, "critic") == []


def test_a_logit_bias_follows_its_token():
    turns = [
        policy_segment(1, 0, (2, 3, 4), stop=(8, 9), min_tokens=2, logit_bias=((5, 1.5),)),
        policy_segment(2, 1, (6,), stop=(8,)),
    ]
    [row] = flatten(group_of([given_tokens(0, None, (1,)), *turns]), "policy")
    early, late = ((8, -math.inf), (9, -math.inf), (5, 1.5)), ((5, 1.5),)
    assert row.bias == ((), early, early, late, ())
    plain = [given_tokens(0, None, (1,)), policy_segment(1, 0, (2,), stop=(8,))]
    assert flatten(group_of(plain), "policy")[0].bias is None


def test_a_row_says_why_its_conversation_left_another():
    def branch(index, reason):
        fork = None if reason is None else Fork(reason=reason)
        return [replace(given_tokens(index, None, (1, 2)), fork=fork), policy_segment(index + 1, index, (3, 4))]

    segments = [*branch(0, None), *branch(2, "template"), *branch(4, "edited")]
    assert [row.fork for row in flatten(group_of(segments), "policy")] == [None, "template", "edited"]


def test_untrainable_rollouts_are_refused():
    mixed = [
        given_tokens(0, None, (1,)),
        policy_segment(1, 0, (2,), temperature=1.0),
        policy_segment(2, 1, (3,), temperature=0.5),
    ]
    cases = {
        "one temperature": group_of(mixed),
        "first token": group_of([policy_segment(0, None, (1, 2))]),
        "not for training": group_of(forked_trajectory(), purpose="eval"),
    }
    for message, group in cases.items():
        with pytest.raises(ValueError, match=message):
            flatten(group, "policy")


def test_batches_come_in_admission_order_and_take_no_group_early():
    groups = [make_group(f"g{i}", [1.0, 0.0], index=i) for i in range(5)]
    found = collect_as_taken(groups, steps=range(3, 10), groups_per_step=2)
    assert [(batch.step, batch.groups, taken) for batch, taken in found] == [
        (3, ("g0", "g1"), 2),
        (4, ("g2", "g3"), 4),
        (5, ("g4",), 5),
    ]
    assert [batch.groups for batch in collect(groups, groups_per_step=2)] == [("g0", "g1")]


def test_the_account_balances_over_failed_filtered_and_zero():
    groups = [
        make_group("mixed", [1.0, 0.5, 0.0], length=3, failed=2),
        make_group("flat", [1.0, 1.0], length=4, failed=1),
        make_group("gone", [], failed=2),
    ]
    [batch] = collect(groups)
    assert batch.account == TokenAccount(sampled=9 + 6 + 8 + 4 + 4, trained=6, filtered=8, zero_advantage=3, failed=14)
    assert batch.account.balanced
    assert [row.id for row in batch.rows] == ["mixed-0#0", "mixed-2#0"], "a row without advantage is not computed"
    assert batch.denominators == {"policy": 9.0}, "but its tokens count: the mean is over the groups that remain"
    assert batch.groups == ("mixed", "flat", "gone")


@pytest.mark.parametrize(
    "preset", ["grpo", "dr_grpo", "gspo", "rloo", "maxrl", "gmpo", "m2po", "opo", "vespo", "decoupled_ppo"]
)
def test_a_flat_group_counts_in_the_denominator_and_is_not_computed(preset):
    groups = [
        make_group("flat", [1.0] * 4),
        make_group("mixed", [1.0, 0.0, 0.0, 0.0]),
        make_group("hopeless", [0.0] * 4),
    ]
    algo = msgspec.convert(named({"preset": preset}), AlgoConfig)
    trajectories = {"grpo": 12, "dr_grpo": 12, "gspo": 12, "rloo": 12, "maxrl": 12, "gmpo": 12, "vespo": 12}.get(preset)
    assert _update_batch(groups, algo) == (["mixed-0#0", "mixed-1#0", "mixed-2#0", "mixed-3#0"], trajectories or 24)
    filtered = msgspec.structs.replace(algo, zero_variance_filter=True)
    assert _update_batch(groups, filtered)[1] == (trajectories or 24) / 3, "the steps of DAPO are larger"


@pytest.mark.parametrize(
    "more", [{"kl": {"coefficient": 0.1}}, {"entropy_bonus": 0.1}, {"gate": "kl_cov"}, {"correction": "k3_rejection"}]
)
def test_a_flat_group_with_another_gradient_is_computed(more):
    groups = [make_group("flat", [1.0, 1.0]), make_group("mixed", [1.0, 0.0])]
    algo = msgspec.convert(named({"preset": "grpo", **more}), AlgoConfig)
    assert _update_batch(groups, algo)[0] == ["flat-0#0", "flat-1#0", "mixed-0#0", "mixed-1#0"]


def _update_batch(groups, algo):
    """Which rows of an update are computed, and what the policy term is divided by."""
    samples = [row for group in groups for row in flatten(group, "policy")]
    plan = Plan(idle_rows=algo.needs_idle_rows)
    [batch] = assemble(
        groups, samples, credit=load_credit(algo, seed=0, max_tokens=10), model="policy", step=1, plan=plan
    )
    assert batch.account.balanced
    return [row.id for row in batch.rows], pytest.approx(batch.denominators["policy"])


def test_an_update_of_flat_groups_alone_has_no_rows_and_counts_its_tokens():
    groups = [make_group("a", [1.0, 1.0]), make_group("b", [0.0, 0.0])]
    samples = [row for group in groups for row in flatten(group, "policy")]
    [batch] = assemble(groups, samples, credit=load_credit(AlgoConfig(), seed=0), model="policy", step=1)
    assert (batch.rows, batch.denominators) == ((), {"policy": 8.0})
    assert batch.account == TokenAccount(sampled=8, zero_advantage=8)


def test_a_step_whose_groups_are_all_filtered_has_no_rows():
    [batch] = collect([make_group("a", [1.0, 1.0]), make_group("b", [0.0, 0.0])])
    assert (batch.rows, batch.denominators) == ((), {})
    assert batch.account == TokenAccount(sampled=8, filtered=8)


class Tampering:
    """Changes what another credit returns."""

    def __init__(self, change):
        self._change = change

    def denominator(self, rows):
        return None

    def credit(self, groups, samples):
        return [self._change(rows) for rows in Centred().credit(groups, samples)]


@pytest.mark.parametrize(
    "change",
    [
        lambda rows: rows[:-1],
        lambda rows: [*rows, rows[0]],
        lambda rows: [replace(row, weights={"policy": (0.0,) * len(row.tokens)}) for row in rows],
        lambda rows: [replace(row, advantages=None) for row in rows],
    ],
)
def test_a_credit_that_loses_or_doubles_tokens_is_refused(change):
    group = make_group("g", [1.0, 0.0])
    with pytest.raises(SparringError, match="expected"):
        assemble([group], flatten(group, "policy"), credit=Tampering(change), model="policy", step=1)


class Reference:
    """An annotator that writes each token's id."""

    async def annotate(self, samples):
        return [replace(row, annotations={"reference": tuple(map(float, row.tokens))}) for row in samples]


def test_samples_are_annotated():
    [batch] = collect([make_group("a", [1.0, 0.0])], annotators=[Reference()])
    assert batch.rows[0].annotations["reference"] == (1.0, 2.0, 3.0, 4.0)


class Forgetful(Reference):
    """It leaves one row out."""

    async def annotate(self, samples):
        return [samples[0], *await super().annotate(samples[1:])]


def test_a_batch_with_only_some_rows_annotated_is_refused():
    said = "row a-1#0: expected the annotations of row a-0#0"
    with pytest.raises(SparringError, match=said):
        collect([make_group("a", [1.0, 0.0])], annotators=[Forgetful()])


def test_every_pass_of_an_update_trains_each_token_once():
    groups = [make_group(f"g{n}", [1.0, 0.0, 4.0, 0.0], index=n) for n in range(4)]
    [whole] = collect(groups)
    found = collect(groups, plan=Plan(minibatches=3, passes=2, seed=5))
    assert [batch.ends_update for batch in found] == [batch.publish for batch in found] == [False] * 5 + [True]
    assert {batch.step for batch in found} == {1}
    assert found[-1].account == whole.account and found[-1].groups == whole.groups
    assert not any(batch.groups or batch.account.sampled for batch in found[:-1])
    for third in (found[:3], found[3:]):
        assert sorted(row.id for batch in third for row in batch.rows) == sorted(row.id for row in whole.rows)
        assert sum(batch.denominators["policy"] for batch in third) == whole.denominators["policy"]
    assert [row.id for row in found[0].rows] != [row.id for row in found[3].rows], "each pass has an order of its own"
    assert collect(groups, plan=Plan(minibatches=3, passes=2, seed=5)) == found


def test_branches_of_one_trajectory_stay_in_one_minibatch():
    scores = tuple(Score(reward=n * n) for n in range(4))
    group = replace(group_of(*[forked_trajectory()] * 4), scores=scores)
    found = collect([group], credit=load_credit(AlgoConfig(), seed=0), plan=Plan(minibatches=4))
    assert [len(batch.rows) for batch in found] == [2, 2, 2, 2]
    assert all(len({row.trajectory for row in batch.rows}) == 1 for batch in found)


def test_a_branch_without_advantage_is_computed_if_it_enters_anothers_ratio():
    class FirstBranch(Centred):
        def _group(self, group, rows):
            return [
                replace(row, advantages=(float(row.branch == 0 == row.id.find("r0")),) * len(row.tokens))
                for row in rows
            ]

    group = group_of(*[forked_trajectory()] * 2)
    for plan, expected in ((Plan(), ["r0#0"]), (Plan(whole_trajectories=True), ["r0#0", "r0#1"])):
        [batch] = collect([group], credit=FirstBranch(), plan=plan)
        assert [row.id for row in batch.rows] == expected and batch.account.balanced


def test_both_sides_of_a_pair_stay_in_one_minibatch():
    groups = [make_group(f"g{n}", [1.0, 0.0, 0.5], index=n) for n in range(5)]
    found = collect(groups, credit=Pairs(), plan=Plan(minibatches=3))
    assert len(found) == 3 and sum(len(batch.rows) for batch in found) == 10
    for batch in found:
        for group in {row.group for row in batch.rows}:
            assert sorted(row.label for row in batch.rows if row.group == group) == [-1.0, 1.0]


class Judged(Centred):
    """The same, where a critic's values and targets are written beside the advantage."""

    def _group(self, group, rows):
        return [
            replace(row, annotations={"value": (0.0,) * len(row.tokens), "return": row.advantages})
            for row in super()._group(group, rows)
        ]


def test_a_critic_trains_on_the_same_rollouts_before_the_policy():
    groups = [
        make_group("a", [0.0, 1.0, 0.5]),
        make_group("b", [2.0, 2.0], index=1),
        make_group("c", [1.0, 3.0], index=2, failed=1),
    ]
    samples = [row for group in groups for row in flatten(group, "policy")]
    plan = Plan(minibatches=2, passes=2, learners={"critic": value_rows}, warmup_steps=1)
    warming, later = (
        assemble(groups, samples, credit=Judged(), model="policy", step=step, plan=plan) for step in (1, 2)
    )
    for batches_of in (warming, later):
        assert [batch.model for batch in batches_of] == ["critic", "policy"] * 4
        for last in ([batch.ends_update for batch in batches_of], [batch.publish for batch in batches_of]):
            assert last == [False] * 7 + [True]
        assert [batch.account != TokenAccount() for batch in batches_of] == [False] * 7 + [True]
    for critic, policy in zip(later[::2], later[1::2], strict=True):
        assert {row.id for row in policy.rows} <= {row.id for row in critic.rows}
        assert critic.denominators == {"value": sum(sum(row.weights["value"]) for row in critic.rows)}
        assert policy.denominators.keys() == {"policy"}
    ids = sorted(row.id for batch in later[:4:2] for row in batch.rows)
    assert ids == ["a-0#0", "a-1#0", "a-2#0", "c-0#0", "c-1#0"], "each once a pass; a filtered group teaches nobody"
    assert later[-1].account == TokenAccount(sampled=16, trained=8, filtered=4, zero_advantage=2, failed=2)
    assert not any(batch.rows for batch in warming[1::2]) and all(batch.rows for batch in warming[::2])
    assert warming[-1].account == TokenAccount(sampled=16, trained=0, filtered=4, zero_advantage=10, failed=2)


def test_a_critic_without_targets_is_an_error():
    groups = [make_group("a", [0.0, 1.0])]
    with pytest.raises(SparringError, match="expected the annotation 'value' for the critic"):
        plan = Plan(learners={"critic": value_rows})
        assemble(groups, flatten(groups[0], "policy"), credit=Centred(), model="policy", step=1, plan=plan)


def test_an_update_with_few_rows_keeps_its_number_of_optimiser_steps():
    found = collect([make_group("a", [1.0, 0.0])], plan=Plan(minibatches=4))
    assert [len(batch.rows) for batch in found] == [0, 1, 0, 1] and found[-1].ends_update
