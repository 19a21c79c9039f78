"""Numbers worked from the equations as they stand in the papers, at the defaults and presets that their authors use."""

import itertools
from math import exp, log, sqrt

import msgspec
import pytest
import torch
from policy_cases import computed

from sparring.algo.config import AlgoConfig, named
from sparring.algo.gate.sapo import Sapo
from sparring.algo.rare.gate.clip_cov import ClipCov
from sparring.algo.rare.gate.geometric import Geometric
from sparring.algo.rare.gate.kl_cov import KlCov
from sparring.algo.rare.gate.kl_mask import KlMask
from sparring.algo.rare.gate.m2po import M2po
from sparring.algo.rare.gate.topr import ToprGate
from sparring.algo.rare.gate.tv_mask import TvMask
from sparring.algo.rare.gate.vespo import Vespo
from sparring.algo.rules import CreditRule
from sparring.batch.plain_groups import by_member, nouns, simple_group

LENGTH = 2


def row(name, log_ratios, advantages, now=None):
    """A response; the log-probabilities now are -1 unless given."""
    now = [-1.0] * len(log_ratios) if now is None else now
    before = [at - moved for at, moved in zip(now, log_ratios, strict=True)]
    flat = [0.0] * len(now)
    return {
        "trajectory": name,
        "turns": [len(now)],
        "logprob": now,
        "before": before,
        "behaviour": before,
        "reference": now,
        "entropy": flat,
        "advantage": advantages,
        "share": flat,
    }


def objective(algo, *rows):
    """J, whose negative is the loss, and its gradient by each log-probability."""
    loss, gradient, _, _ = computed({"algo": named(algo), "rows": list(rows), "max_tokens": LENGTH})
    return -loss, [[-x for x in of] for of in gradient]


def credited(rule, *groups):
    made, samples = nouns(groups)
    return by_member(groups, msgspec.convert(rule, CreditRule).open().credit(made, samples))


def test_defaults_are_the_authors():
    assert (Sapo().tau_positive, Sapo().tau_negative) == (1.0, 1.05)
    assert (Vespo().k_positive, Vespo().lambda_positive, Vespo().k_negative, Vespo().lambda_negative) == (
        2.0,
        3.0,
        3.0,
        2.0,
    )
    assert (M2po().bound, TvMask().above, KlMask().above, ToprGate().bound) == (0.04, 0.15, 0.05, 1.0)
    assert (Geometric().low, Geometric().high) == pytest.approx((exp(-0.4), exp(0.4)), rel=1e-5)
    assert (ClipCov().share, ClipCov().low, ClipCov().high, ClipCov().clip_low, ClipCov().clip_high) == (
        2e-4,
        1.0,
        5.0,
        1.0,
        1.0,
    )
    assert (KlCov().share, KlCov().coefficient) == (2e-3, 1.0)


def test_sapo():
    """Equations 5 and 6: 4 sigmoid(0.5) and 4 sigmoid(-0.5), of mean 2; 4 / 1.05 sigmoid(1.05) = 2.8219996."""
    value, gradient = objective(
        {"preset": "sapo"}, row("good", [log(1.5), log(0.5)], [1.0, 1.0]), row("bad", [log(2.0)], [-1.0])
    )
    assert value == pytest.approx((2.0 - 2.8219996) / 2, abs=1e-7)
    # the gradient of a token: 4 sigmoid (1 - sigmoid) r A
    assert gradient[0] == pytest.approx([4 * 0.2350037122 * 1.5 / 4, 4 * 0.2350037122 * 0.5 / 4], abs=1e-9)


def test_vespo():
    """Equation 20: W = 1.25 * 0.96 = 1.2 gives 1.44 e^-0.6 = 0.790288756, and W = 0.5 gives 0.125 e = 0.339785229."""
    rows = row("good", [log(1.25), log(0.96)], [0.5, 0.5]), row("bad", [log(0.5)], [-0.5])
    _, gradient = objective({"preset": "vespo"}, *rows)
    good, bad = 0.790288756 * 0.5 / 2, -0.339785229 * 0.5 / 2
    assert [x for of in gradient for x in of] == pytest.approx([good, good, bad], abs=1e-9)


def test_m2po():
    """Algorithm 1: the tokens of a trust region have squares 0.25, 0.01 and 0.09; their mean falls to 0.01 as the
    largest go one by one. Tokens that come back count for nothing, however far they are."""
    rows = row("good", [0.5, 0.1, -0.9], [1.0, 1.0, 1.0]), row("bad", [-0.3, 0.8], [-1.0, -1.0])
    value, gradient = objective({"preset": "m2po"}, *rows)
    assert value == pytest.approx((exp(0.1) + exp(-0.9) - exp(0.8)) / 5, abs=1e-12)
    assert [x == 0.0 for of in gradient for x in of] == [True, False, False, True, False]
    # of these, those that move away have a mean of 0.0394, though that of all is 0.3
    rows = row("good", [0.27, 0.05, -0.9], [1.0, 1.0, 1.0]), row("bad", [-0.21, 0.8], [-1.0, -1.0])
    assert all(x != 0.0 for of in objective({"preset": "m2po"}, *rows)[1] for x in of)


def test_topr():
    """Equations 7 and 8: a reward of 1 teaches plainly; of -1 with the trajectory's ratio, 2 * 0.25, or 1 in the place
    of 3."""
    good = row("good", [log(0.1)], [1.0])
    bad = row("bad", [log(2.0), log(0.25)], [-1.0, -1.0]), row("likely", [log(2.0), log(1.5)], [-1.0, -1.0])
    _, gradient = objective({"preset": "topr"}, good, *bad)
    assert [x for of in gradient for x in of] == pytest.approx([1 / 3, -0.5 / 3, -0.5 / 3, -1 / 3, -1 / 3], abs=1e-12)


def test_gmpo():
    """Equation 4: |min(2 A, e^0.4 A)| and |0.5 A| of A = 2; |min(-0.5, -e^-0.4)| and 1.2 of A = -1."""
    rows = row("good", [log(2.0), log(0.5)], [2.0, 2.0]), row("bad", [log(0.5), log(1.2)], [-1.0, -1.0])
    value, _ = objective({"preset": "gmpo"}, *rows)
    assert value == pytest.approx((sqrt(2 * exp(0.4) * 2 * 0.5) - sqrt(exp(-0.4) * 1.2)) / 2, rel=1e-5)


@pytest.mark.parametrize(
    ("settings", "likely_stays"),
    [({"preset": "dppo"}, False), ({"preset": "dppo", "gate": {"above": 0.2}}, True), ({"preset": "dppo_kl"}, False)],
)
def test_dppo(settings, likely_stays):
    """Section 4.2: from 0.0001 to 0.01 moves 0.0099 and has a KL divergence of 0.0095; from 0.99 to 0.8 moves 0.19 and
    has one of 0.1810. Equation 12 never stops what comes back, such as a good token that fell from 0.9 to 0.3."""
    then, now = [0.0001, 0.99, 0.9], [0.01, 0.8, 0.3]
    moved = [log(p / m) for p, m in zip(now, then, strict=True)]
    value, gradient = objective(settings, row("a", moved, [1.0, -1.0, 1.0], now=[log(p) for p in now]))
    assert value == pytest.approx((100.0 - 0.8 / 0.99 * likely_stays + 0.3 / 0.9) / LENGTH, rel=1e-9)
    assert [x != 0.0 for x in gradient[0]] == [True, likely_stays, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_binary_divergence_at_certain_tokens(dtype):
    """Equation 14 at its ends: 1 and 1 are 0 apart, 1 and 0.9 are log(1 / 0.9) = 0.105, 0.9 and 1 infinitely."""
    now, moved = [0.0, log(0.9), 0.0], [0.0, log(0.9), -log(0.9)]
    rows = [row("a", moved, [1.0, -1.0, 1.0], now=now)]
    _, gradient, _, _ = computed({"algo": {"preset": "dppo_kl"}, "rows": rows, "max_tokens": LENGTH}, dtype)
    assert [x != 0.0 for x in gradient[0]] == [True, False, False]


COVARIANCES = row("a", [log(1.1), log(0.9), log(1.2), log(0.8)], [2.0, 1.0, -1.0, -2.0], now=[-0.5, -1.5, -2.5, -3.5])
"""By equation 10: 1.5 * 2 = 3, 0.5 * 1, 0.5 * 1 and 3."""


def test_clip_cov():
    """Equations 11 and 12: two of four tokens among those between 1 and 5 have no gradient."""
    value, gradient = objective({"preset": "clip_cov", "gate": {"share": 0.5}}, COVARIANCES)
    assert value == pytest.approx((0.9 * 1 - 1.2 * 1) / 4, abs=1e-12)
    assert gradient[0] == pytest.approx([0.0, 0.9 / 4, -1.2 / 4, 0.0], abs=1e-12)


def test_clip_cov_as_its_authors_code_has_it():
    """Beside the paper: at least one token is chosen, PPO's clip decides the others, and what it decides is not drawn.
    The first token's ratio of 2.1 is clipped at 2, so that the fourth is the one candidate with a covariance between 1
    and 5."""
    far = row("a", [log(2.1), log(0.9), log(1.2), log(0.8)], [2.0, 1.0, -1.0, -2.0], now=[-0.5, -1.5, -2.5, -3.5])
    value, gradient = objective({"preset": "clip_cov"}, far)
    assert value == pytest.approx((2.0 * 2 + 0.9 * 1 - 1.2 * 1) / 4, abs=1e-12)
    assert gradient[0] == pytest.approx([0.0, 0.9 / 4, -1.2 / 4, 0.0], abs=1e-12)


def test_kl_cov_charges_at_least_one():
    value, _ = objective({"preset": "kl_cov"}, COVARIANCES)
    assert value == pytest.approx((2.2 + 0.9 - 1.2 - 1.6 - abs(log(1.1))) / 4, abs=1e-12)


def test_decoupled_ppo_masks_what_is_weighed_above_five():
    """AReaL's `token_mask`: of weights 1, 4 and 8 the last is 0, and counts in the denominator."""
    stale = {**row("a", [0.0, 0.0, 0.0], [1.0, 1.0, 1.0]), "behaviour": [-1.0, -1.0 - log(4), -1.0 - log(8)]}
    _, gradient = objective({"preset": "decoupled_ppo"}, stale)
    assert gradient[0] == pytest.approx([1 / 3, 4 / 3, 0.0], rel=1e-6)


def test_kl_cov():
    """Equations 13 and 14, with |log r| for the divergence: the two largest of four are charged."""
    value, _ = objective({"preset": "kl_cov", "gate": {"share": 0.5}}, COVARIANCES)
    assert value == pytest.approx((2.2 + 0.9 - 1.2 - 1.6 - abs(log(1.1)) - abs(log(0.8))) / 4, abs=1e-12)


def test_luspo():
    """Equation 7: s = sqrt(1.21) = 1.1, clipped at 1.0025, times 2 tokens; s = 0.9, clipped at 0.998, times 1."""
    rows = row("good", [log(1.21), 0.0], [1.0, 1.0]), row("bad", [log(0.9)], [-1.0])
    assert objective({"preset": "luspo"}, *rows)[0] == pytest.approx((2 * 1.0025 - 0.998) / 2, abs=1e-12)


def test_optimal_token_baseline():
    """Squared norms 0.5 and 1 at the first token: (0.5 * 1 + 1 * 0) / 1.5. The first member's second token has nobody
    to be compared with: the code of its authors takes 0 there, the equation its own return."""
    tokens = [{"logprob": [log(p)] * n, "probability_squares": [0.5] * n} for p, n in ((0.5, 2), (0.25, 1))]
    group = simple_group([1.0, 0.0], lengths=(2, 1), tokens=tokens)
    for settings, alone in (({}, 1.0), ({"zero_tail": False}, 0.0)):
        [[first, second]] = credited({"name": "optimal_token_baseline", **settings}, group)
        assert first == pytest.approx([2 / 3, alone]) and second == pytest.approx([-1 / 3])


def test_gdpo():
    """Equations 4 to 7: (1, 0, 1) becomes (1, -2, 1) / sqrt(3), (0, 0, 3) becomes (-1, -1, 2) / sqrt(3); their sum (0,
    -3, 3) / sqrt(3) has a standard deviation of sqrt(3)."""
    parts = [{"a": a, "b": b} for a, b in ((1.0, 0.0), (0.0, 0.0), (1.0, 3.0))]
    rule = {"name": "gdpo", "weights": {"a": 1.0, "b": 1.0}, "epsilon": 1e-300}
    [[first, second, third]] = credited(rule, simple_group([0.0] * 3, parts=parts))
    assert (*first, *second, *third) == pytest.approx((0.0, -1.0, 1.0), abs=1e-12)


@pytest.mark.parametrize("chance", [0.1, 0.3, 0.8])
def test_maxrl(chance):
    """The expectation over all outcomes of three is the derivative of -(1 - p) - (1 - p)^2 / 2: the expansion of log p
    to an order less than there are rollouts, for the baseline costs one."""
    expected = 0.0
    for outcomes in itertools.product((1.0, 0.0), repeat=3):
        [members] = credited({"name": "maxrl"}, simple_group(outcomes))
        scores = [1 / chance if won else -1 / (1 - chance) for won in outcomes]
        likely = chance ** sum(outcomes) * (1 - chance) ** (3 - sum(outcomes))
        expected += likely * sum(of[0] * score for of, score in zip(members, scores, strict=True)) / 3
    assert expected == pytest.approx(1 + (1 - chance))


def test_opo():
    """The mean reward, weighted by length: (3 * 1 + 1 * 0 + 4 * 0.5) / 8."""
    [[first, second, third]] = credited({"name": "opo"}, simple_group([1.0, 0.0, 0.5], lengths=(3, 1, 4)))
    assert (first, second, third) == ([0.375] * 3, [-0.625], [-0.125] * 4)


def test_reinforce_plus_plus():
    """Equation 4 with beta 0.5 and divergences 0.2 and 0.1: 0.85 and 0.95; of another prompt 0 and 0. Equation 5: their
    mean is 0.45, their variance 0.20375."""
    first = simple_group([1.0], turns=(2,), tokens=[{"reward": [-0.1, -0.05]}])
    second = simple_group([0.0], turns=(2,), tokens=[{"reward": [0.0, 0.0]}])
    [[one], [other]] = credited({"name": "reinforce_plus_plus", "epsilon": 1e-300}, first, second)
    assert one + other == pytest.approx([x / sqrt(0.20375) for x in (0.4, 0.5, -0.45, -0.45)])


def test_reinforce_plus_plus_baseline():
    """Equations 6 and 7: 1 and -1 in one group, 0.5 and -0.5 in another; one token each: a variance of 0.625."""
    groups = simple_group([3.0, 1.0]), simple_group([1.0, 0.0])
    found = credited({"name": "reinforce_plus_plus_baseline", "epsilon": 1e-300}, *groups)
    assert [x for group in found for member in group for x in member] == pytest.approx(
        [x / sqrt(0.625) for x in (1.0, -1.0, 0.5, -0.5)]
    )


@pytest.mark.parametrize("preset", ["dppo", "dppo_kl", "vespo", "m2po", "topr"])
def test_gates_on_the_sampling_policy_take_no_correction(preset):
    """All five define it so; a correction that is asked for still takes its place."""
    config = msgspec.convert(named({"preset": preset}), AlgoConfig)
    assert config.anchor == "behaviour" and config.correction != "auto" and config.correction_rule.does_nothing
    asked = msgspec.convert(named({"preset": preset, "correction": "tis"}), AlgoConfig)
    assert asked.anchor == "proximal" and asked.correction_rule.weight == "token"


@pytest.mark.parametrize("preset", ["reinforce", "rloo", "remax", "maxrl", "optimal_token_baseline", "spiral", "raft"])
def test_policy_gradients_are_sums_over_a_response_and_means_over_responses(preset):
    """sum_i sum_t A_i,t grad log pi(y_i,t) / G: whatever the length of a response; on policy the ratio is 1, and
    nothing is clipped."""
    rows = [row("a", [0.0, 0.0], [0.5, -1.5]), row("b", [0.0], [2.0])]
    _, gradient = objective({"preset": preset}, *rows)
    assert gradient == [[0.25, -0.75], [1.0]]
    _, far = objective({"preset": preset}, row("a", [log(3.0)], [2.0]))
    assert far == [[pytest.approx(6.0)]], "off policy the ratio weighs, unclipped"


@pytest.mark.parametrize("preset", ["mt_grpo", "grpo_process", "gigpo"])
def test_grpo_with_another_credit_keeps_its_clip_and_its_mean_over_a_response(preset):
    rows = [row("a", [0.0, log(1.3)], [0.5, 1.0]), row("b", [log(0.9)], [2.0])]
    value, gradient = objective({"preset": preset}, *rows)
    assert value == pytest.approx(((0.5 + 1.2) / 2 + 0.9 * 2) / 2)
    assert gradient == [[pytest.approx(0.125), 0.0], [pytest.approx(0.9)]]
