"""Small sums from public reports of wrong steps in other trainers, worked by hand: what the report says is right, or
what the formula gives in plain arithmetic, never what a reference of ours gives.

Each case names the report that it stems from. Tokens of tools and prompts carry values of 100 where a report has such
tokens, so that one that leaks is seen.
"""

import asyncio
from dataclasses import dataclass, replace

import msgspec
import pytest
import torch

from sparring.algo.annotate.provenance import SampleProvenance
from sparring.algo.annotate.teacher import ScoreClient, TeacherRows
from sparring.algo.config import AlgoConfig, named
from sparring.algo.loss.distill import SampledDistillLoss
from sparring.algo.loss.policy import PolicyLoss
from sparring.algo.pipeline import load_credit
from sparring.algo.rules import CreditRule
from sparring.batch.batches import assemble
from sparring.batch.flatten import flatten
from sparring.batch.plain_groups import by_member, nouns, simple_group
from sparring.batch.tensors import micro_batch
from sparring.generation import Scores
from sparring.types import Outcome, Segment

LEAK = 100.0


def leaky(row):
    """The row with values of 100 wherever the policy did not sample."""
    spread = {
        name: tuple(value if weight else LEAK for value, weight in zip(values, row.weights["policy"], strict=True))
        for name, values in row.annotations.items()
    }
    return replace(row, annotations=spread)


def credited(rule, groups, name=""):
    """Of each sampled token of each member its advantage, or an annotation."""
    made, samples = nouns(groups)
    rows = msgspec.convert(rule, CreditRule).open().credit(made, [[leaky(row) for row in of] for of in samples])
    if not name:
        return by_member(groups, rows)
    clean = [
        [replace(row, annotations={name: _where_weighted(row, row.annotations[name])}) for row in of] for of in rows
    ]
    return by_member(groups, clean, name)


def _where_weighted(row, values):
    return tuple(value if weight else 0.0 for value, weight in zip(values, row.weights["policy"], strict=True))


# Returns and values across what a tool has said.


def test_a_value_at_a_masked_place_moves_no_advantage():
    """https://github.com/alibaba/ROLL/pull/447: two tokens, a masked one of value 100, reward 1, lambda 0.95. There the
    advantages were 5.7 and 6; right are 0.95 * (1 - 0) and 1 - 0. Here the masked one stands between the two and
    before them."""
    group = simple_group([1.0], turns=(1, 1), tokens=[{"value": [0.0, 0.0]}])
    rule = {"name": "gae", "discount": 1.0, "lambda_policy": 0.95, "lambda_value": 0.95, "whiten": False}
    assert credited(rule, [group]) == [[pytest.approx([0.95, 1.0])]]
    assert credited(rule, [group], "return") == [[pytest.approx([0.95, 1.0])]]


def test_a_return_passes_what_a_tool_has_said():
    """https://github.com/verl-project/verl/pull/6376: model, tool, model, reward 1 at the end, discount 0.5: the returns
    of the two model tokens are 0.5 and 1, where the first was 0."""
    group = simple_group([1.0], turns=(1, 1))
    assert credited({"name": "reinforce", "discount": 0.5}, [group]) == [[pytest.approx([0.5, 1.0])]]


@pytest.mark.parametrize("turns", [(4,), (2, 2), (1, 3)])
def test_a_tool_between_the_turns_changes_no_return(turns):
    """https://github.com/verl-project/verl/issues/7278: two model tokens, two of a tool, two model tokens, against four
    model tokens. The returns are 1 four times; beside a member that earned 0 for as many tokens all are 1/2 from the
    mean 1/2 and the deviation is 1/2, so that the whitened ones are 1 and -1."""
    group = simple_group([1.0, 0.0], turns=turns)
    assert credited({"name": "reinforce"}, [group]) == [[[1.0] * 4, [0.0] * 4]]
    whitened = credited({"name": "reinforce_plus_plus", "epsilon": 1e-300}, [group])
    assert whitened == [[pytest.approx([1.0] * 4), pytest.approx([-1.0] * 4)]]


def test_a_price_at_a_masked_place_is_paid_by_nobody():
    """https://github.com/THUDM/slime/pull/1372, https://github.com/radixark/miles/pull/1383: a price of 1 at every place,
    two of them masked, discount 0.9. Paid by the two sampled tokens alone: -1 - 0.9 * 1 and -1."""
    group = simple_group([0.0], turns=(1, 1), tokens=[{"reward": [-1.0, -1.0]}])
    assert credited({"name": "reinforce", "discount": 0.9}, [group]) == [[pytest.approx([-1.9, -1.0])]]


# Groups whose siblings are all alike.


@pytest.mark.parametrize("rule", ["rloo", "grpo"])
def test_one_success_among_equals_stays_small(rule):
    """https://github.com/NVIDIA-NeMo/RL/issues/1518: rewards 1, 0, 0, 0, where leaving one out and dividing by the others'
    deviation gave a million. Leaving one out: 1 - 0, and 0 - 1/3. By the group's own deviation, sqrt((9/16 + 3/16) / 3) =
    1/2: (3/4) / (1/2) and (-1/4) / (1/2)."""
    expected = {"rloo": [1.0, -1 / 3, -1 / 3, -1 / 3], "grpo": [1.5, -0.5, -0.5, -0.5]}[rule]
    [found] = credited({"name": rule}, [simple_group([1.0, 0.0, 0.0, 0.0])])
    assert [value for [value] in found] == pytest.approx(expected, rel=3e-6)


@pytest.mark.parametrize("value", [0.95, 0.35, 0.1, 1 / 3])
def test_rewards_that_no_float_has_make_no_spike(value):
    """https://github.com/NVIDIA-NeMo/RL/pull/4158, pull 4161: one 0 among seven of 0.95 (0.35): the others' deviation is
    0, and its rounding was divided by. Leaving one out: 0 - v for the odd one, and v - 6/7 v = v/7 for the others; eight
    equal ones give exactly nothing."""
    [found] = credited({"name": "rloo"}, [simple_group([0.0] + [value] * 7)])
    assert [advantage for [advantage] in found] == pytest.approx([-value] + [value / 7] * 7, rel=1e-12)
    for rule in ("rloo", "grpo", "opo", "reinforce_plus_plus_baseline", {"name": "gpg", "divide": True}):
        rule = {"name": rule} if isinstance(rule, str) else rule
        [equal] = credited(rule, [simple_group([value] * 8)])
        assert equal is None or [advantage for [advantage] in equal] == [0.0] * 8


def test_a_part_that_a_member_lacks_makes_no_nan_of_the_others():
    """https://github.com/modelscope/ms-swift/issues/8123, https://github.com/huggingface/trl/pull/5773: three members, the
    last without `right`, which is worth 0 to it. right = 1, 0, 0 has deviation 1/sqrt(3): (2/3, -1/3, -1/3) sqrt(3).
    form = 1, 1, 0 has the same deviation: (1/3, 1/3, -2/3) sqrt(3). The sums are (1, 0, -1) sqrt(3), of deviation
    sqrt(3)."""
    parts = [{"form": 1.0, "right": 1.0}, {"form": 1.0, "right": 0.0}, {"form": 0.0}]
    rule = {"name": "gdpo", "weights": {"form": 1.0, "right": 1.0}, "epsilon": 1e-300}
    [found] = credited(rule, [simple_group([2.0, 1.0, 0.0], parts=parts)])
    assert [advantage for [advantage] in found] == pytest.approx([1.0, 0.0, -1.0], abs=1e-12)


# What a loss is divided by.


def losses(groups, aggregation, parts, drop=(), **algo):
    """The loss of each of these micro-batches (numbers of rows) of one update, at ratios of 1, and its derivatives by
    the log-probabilities. `drop`: rollouts of the first group that broke."""
    config = msgspec.convert(named({"aggregation": aggregation, **algo}), AlgoConfig)
    made, _ = nouns(groups)
    broken = Outcome(kind="infra_failed", reason="failure")
    kept = [number for number in range(len(made[0].rollouts)) if number not in drop]
    failed = tuple(
        replace(r, trajectories=tuple(replace(t, outcome=broken) for t in r.trajectories))
        for number, r in enumerate(made[0].rollouts)
        if number in drop
    )
    chosen = {name: tuple(getattr(made[0], name)[number] for number in kept) for name in ("rollouts", "scores")}
    made[0] = replace(made[0], **chosen, failed=failed)
    samples = [row for group in made for row in flatten(group, "policy")]
    credit = load_credit(config, seed=0, max_tokens=config.max_tokens or 1)
    [batch] = assemble(made, samples, credit=credit, model="policy", step=1)
    found, slopes = [], []
    for rows in parts:
        micro = micro_batch([batch.rows[row] for row in rows], batch.denominators)
        logprob = micro.behaviour_logprobs.clone().requires_grad_(True)
        result = PolicyLoss(config)({"logprob": logprob, "entropy": torch.zeros_like(logprob)}, micro)
        result.loss.backward()
        found.append(result.loss.item())
        slopes += logprob.grad.tolist()
    return found, slopes


ONE_AND_THREE = simple_group([1.0, -1.0], lengths=(1, 3))
"""Advantages 1 and -1 (the mean is 0), one token and three."""
PLAIN = {"credit": {"name": "grpo", "normalise": False}}


@pytest.mark.parametrize("parts", [[[0, 1]], [[0], [1]]], ids=["one micro-batch", "two"])
@pytest.mark.parametrize(
    ("aggregation", "expected", "slopes", "more"),
    [
        # (-1 + 3) / 4 tokens, where a mean of the micro-batches' means was 0
        ("token_mean", 0.5, [-1 / 4, *[1 / 4] * 3], {}),
        # (-1 + 3/3) / 2 sequences
        ("sequence_mean", 0.0, [-1 / 2, *[1 / 6] * 3], {}),
        # (-1 + 3) / 2 sequences, each of which is a sum and no mean
        ("sequence_sum", 1.0, [-1 / 2, *[1 / 2] * 3], {}),
        # (-1 + 3) / (2 sequences of 8 tokens at most)
        ("constant", 1 / 8, [-1 / 16, *[1 / 16] * 3], {"max_tokens": 8}),
    ],
)
def test_no_micro_batch_and_no_length_changes_what_is_divided_by(aggregation, expected, slopes, more, parts):
    """https://github.com/modelscope/twinkle/pull/292, https://github.com/verl-project/verl/issues/3741: lengths 1 and 3,
    advantages 1 and -1. https://github.com/verl-project/verl/issues/1233: `seq-mean-token-sum` divided by lengths.
    https://github.com/verl-project/verl/pull/5798: by the number of parts."""
    found, derivatives = losses([ONE_AND_THREE], aggregation, parts, **PLAIN, **more)
    assert sum(found) == pytest.approx(expected, abs=1e-7) and derivatives == pytest.approx(slopes, abs=1e-7)


@pytest.mark.parametrize(
    ("aggregation", "expected"), [("token_mean", 1 / 4), ("sequence_mean", 1 / 4), ("sequence_sum", 1 / 2)]
)
def test_what_leaves_the_numerator_leaves_the_denominator(aggregation, expected):
    """https://github.com/huggingface/trl/issues/6369: three rollouts of two tokens, the third of which leaves. Advantages
    of the two that stay, 1 and -1: derivatives of 1 / 4 tokens (or 1/2 of 1/2), and not of 1 / 6."""
    group = simple_group([1.0, -1.0, 7.0], turns=(2,))
    _, derivatives = losses([group], aggregation, [[0, 1]], drop=(2,), **PLAIN)
    assert derivatives == pytest.approx([-expected] * 2 + [expected] * 2)


def test_a_group_that_is_filtered_is_in_no_denominator():
    """The same of DAPO's filter: the second group's rewards are all 1."""
    groups = [simple_group([1.0, -1.0], turns=(2,)), simple_group([1.0, 1.0], turns=(2,))]
    _, derivatives = losses(groups, "token_mean", [[0, 1]], zero_variance_filter=True, **PLAIN)
    assert derivatives == pytest.approx([-1 / 4] * 2 + [1 / 4] * 2)


def test_a_conversation_that_ends_with_a_tool_is_divided_by_what_was_sampled():
    """https://github.com/radixark/miles/pull/1827: the reward of a rollout that ends with what a tool says belongs to the
    last sampled token."""
    made, _ = nouns([simple_group([1.0], turns=(1, 1))])
    [rollout] = made[0].rollouts
    [trajectory] = rollout.trajectories
    said = Segment(index=4, parent=3, source="tool", tokens=(3,) * 900)
    longer = replace(rollout, trajectories=(replace(trajectory, segments=(*trajectory.segments, said)),))
    group = replace(made[0], rollouts=(longer,))
    credit = msgspec.convert({"name": "reinforce", "discount": 0.5}, CreditRule).open()
    [[row]] = credit.credit([group], [flatten(group, "policy")])
    assert [a for a, w in zip(row.advantages, row.weights["policy"], strict=True) if w] == pytest.approx([0.5, 1.0])


# Teachers.


@dataclass
class ByToken:
    """A teacher to whom the log-probability of token i is -(i - 990) / 4."""

    asked: int = 0

    async def score(self, request):
        self.asked += 1
        tokens = request.tokens[request.first :]
        nothing = ((),) * len(tokens)
        logprobs = tuple((990 - token) / 4 for token in tokens)
        return Scores(
            logprobs=logprobs, entropies=(0.0,) * len(tokens), top_ids=nothing, top_logprobs=nothing, version=0
        )


@pytest.mark.parametrize("turns", [(1,), (1, 1), (3, 2)])
def test_a_teacher_judges_the_token_that_was_sampled_and_the_last_one_too(turns):
    """https://github.com/areal-project/AReaL/issues/1728, https://github.com/modelscope/ms-swift/pull/8436: scores one place
    off, so that replies of one token taught nothing. Sampled at log-probability -1, of which the teacher says (990 - i) / 4
    for token i: the derivative of the reverse divergence by its log-probability is (-1 + (i - 990) / 4) / tokens."""
    made, samples = nouns([simple_group([0.0], turns=turns)])
    teacher = ByToken()

    async def annotated():
        async def source():
            yield made[0]

        watch = SampleProvenance()
        assert [group async for group in watch.groups(source())] == made
        return await TeacherRows(watch, {"*": "t"}, {"t": teacher}, ScoreClient()).annotate(samples[0])

    [row] = asyncio.run(annotated())
    [row] = [replace(row, weights={"distill": row.weights["policy"]})]
    ids = [token for token, weight in zip(row.tokens, row.weights["distill"], strict=True) if weight]
    assert ids == [1000 + place for place in range(sum(turns))]  # by which the vectors name sampled tokens
    micro = micro_batch([row], {"distill": float(len(ids))})
    logprob = micro.behaviour_logprobs.clone().requires_grad_(True)
    SampledDistillLoss()({"logprob": logprob}, micro).loss.backward()
    assert logprob.grad.tolist() == pytest.approx([(-1 + (i - 990) / 4) / len(ids) for i in ids])
    assert teacher.asked == 1
