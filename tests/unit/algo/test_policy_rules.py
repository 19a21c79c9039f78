"""What every combination of parts owes: invariants at equal weights, presets, refusals."""

import itertools

import msgspec
import numpy as np
import pytest
from golden.policy import SETTINGS, draw
from policy_cases import computed

from sparring.algo.config import AlgoConfig, named
from sparring.algo.correction.presets import CORRECTIONS
from sparring.algo.correction.rule import Correction
from sparring.algo.presets import ALGORITHMS
from sparring.algo.rules import RULES_BY_KEY

TAGS = {key: [str(rule.__struct_config__.tag) for rule in of] for key, of in RULES_BY_KEY.items()}


def refusal_of(algo):
    try:
        msgspec.convert(named(algo), AlgoConfig)
    except msgspec.ValidationError as error:
        return str(error)
    return None


ALL = [
    {"ratio": {"name": ratio}, "gate": {"name": gate}, "correction": CORRECTIONS[correction], "anchor": anchor}
    for ratio, gate, correction in itertools.product(TAGS["ratio"], TAGS["gate"], CORRECTIONS)
    for anchor in ("behaviour", "proximal", "loglinear")
]
SENSIBLE = [algo for algo in ALL if refusal_of(algo) is None]


def test_every_part_has_golden_vectors():
    assert set(SETTINGS["ratio"]) == set(TAGS["ratio"]) and set(SETTINGS["gate"]) == set(TAGS["gate"])


def plain_at_equal_weights(algos):
    """The ratio is exactly 1, the divergence 0, the clip share 0 and every weight 1, and the gradient is that of A log
    pi."""
    rows = draw(0, spread=0.0)
    count = sum(len(row["logprob"]) for row in rows)
    expected = [-x / count for row in rows for x in row["advantage"]]
    for algo in algos:
        _, gradient, _, metrics = computed(
            {"algo": {**algo, "kl": {"coefficient": 0.1}}, "rows": rows, "max_tokens": 7}
        )
        assert metrics["ratio"] == (count, count) and metrics["approx_kl"][0] == 0 and metrics["reference_kl"][0] == 0
        assert metrics["clip_fraction"][0] == 0, algo
        assert metrics.get("correction_weight", (count, count)) == (count, count)
        assert metrics.get("correction_rejected", (0.0,))[0] == 0
        assert [x for row in gradient for x in row] == pytest.approx(expected, rel=1e-12, abs=1e-15), algo


def test_at_equal_weights_every_part_is_plain_to_the_bit():
    assert len(SENSIBLE) > 300
    chosen = {str(algo[key]): algo for key in ("ratio", "gate", "correction", "anchor") for algo in SENSIBLE}
    assert len(chosen) == len(TAGS["ratio"]) + len(TAGS["gate"]) + len(CORRECTIONS) + 3
    plain_at_equal_weights([*chosen.values(), *SENSIBLE[::11]])


@pytest.mark.slow
def test_at_equal_weights_every_combination_is_plain_to_the_bit():
    plain_at_equal_weights(SENSIBLE)


def test_clip_cov_picks_tokens_at_any_ratio():
    algo = {"gate": {"name": "clip_cov", "share": 0.1, "low": 0.1, "high": 9.0}}
    rows = draw(0, spread=0.0)
    count = sum(len(row["logprob"]) for row in rows)
    _, gradient, _, metrics = computed({"algo": algo, "rows": rows, "max_tokens": 7})
    assert metrics["clip_fraction"] == (int(0.1 * count), count)
    fewest = {"gate": {"name": "clip_cov", "low": 0.1}}
    assert computed({"algo": fewest, "rows": rows, "max_tokens": 7})[3]["clip_fraction"] == (1, count), "at least one"
    idle = sum(len(row["logprob"]) for row in rows if row["trajectory"] == "d")
    assert sum(x == 0 for row in gradient for x in row) in range(int(0.1 * count), int(0.1 * count) + idle + 1)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_preset_is_understood_and_sets_something(name):
    assert msgspec.convert(named({"preset": name}), AlgoConfig) != AlgoConfig(preset=name)
    loss, gradient, _, _ = computed({"algo": ALGORITHMS[name], "rows": draw(1), "max_tokens": 7})
    assert np.isfinite(loss) and np.isfinite([x for row in gradient for x in row]).all()


@pytest.mark.parametrize(
    ("algo", "message"),
    [
        ({"gate": "tv_mask", "ratio": "sequence"}, 'ratio must be "token" with the gate "tv_mask"'),
        ({"gate": "kl_mask", "ratio": "sequence"}, 'ratio must be "token" with the gate "kl_mask"'),
        ({"gate": "geometric", "ratio": "turn"}, 'ratio must be "token" with the gate "geometric"'),
        ({"gate": "m2po", "ratio": "product"}, 'ratio must be "token" with the gate "m2po"'),
        ({"gate": "vespo"}, 'ratio must be "product" with the gate "vespo"'),
        (
            {"gate": "clip", "ratio": "product"},
            'ratio must be "token" or "sequence" or "turn" with the gate "clip", .*: vespo, topr',
        ),
        ({"top_entropy": 0.0}, "top_entropy must lie above 0"),
        ({"correction": "tis", "anchor": "behaviour"}, 'anchor must be "proximal" with a correction'),
        ({"correction": {"bound": "mask"}}, "bound must be left out unless weight is set"),
        ({"correction": {"normalise": True}}, "normalise must be left out unless weight is set"),
        ({"correction": {"only_negative": True}}, "only_negative must be left out unless reject is set"),
        ({"correction": {"reject_below": -0.1}}, "reject_below must be left out unless reject is set"),
        ({"correction": {"reject": "k2", "reject_below": -0.1}}, "reject_below must be left out unless reject = "),
        (
            {"correction": {"reject": "k2", "reject_unit": "token", "reject_by": "max"}},
            "reject_by must be left out with reject_unit",
        ),
        ({"correction": {"metrics_only": True}}, "metrics_only must have a weight or a divergence"),
        (
            {"correction": {"weight": "token", "denominator": "kept"}},
            'denominator must be "all" unless tokens are removed',
        ),
        (
            {"correction": {"reject": "k3", "denominator": "kept", "metrics_only": True}},
            'denominator must be "all" unless tokens are removed',
        ),
        (
            {"correction": {"weight": "token", "bound": "mask", "denominator": "kept", "normalise": True}},
            'denominator must be "all" with normalise',
        ),
        (
            {"correction": {"weight": "token", "bound": "none", "high": 5.0}},
            'high must be left out with bound = "none"',
        ),
        (
            {"correction": {"weight": "token", "bound": "none", "low": 0.5}},
            'low must be 0 unless bound = "mask"',
        ),
        ({"correction": {"bound": "none"}}, "bound must be left out unless weight is set"),
        ({"gate": {"name": "clip_cov", "clip_low": 1.5}}, "clip_low must lie above 0"),
        ({"credit": {"name": "rae", "decay": 0.0}}, "decay must be above 0, where every advantage is 0"),
        (
            {"correction": {"weight": "token", "normalise": True, "metrics_only": True}},
            "normalise must be false with metrics_only",
        ),
        ({"gate": {"name": "dual_clip", "bound": 1.0}}, "bound must be above 1 \\+ high"),
        ({"gate": {"name": "sapo", "tau_positive": 0.0}}, "tau_positive and tau_negative"),
        ({"gate": {"name": "topr", "bound": 0.5}}, "bound must be at least 1"),
        ({"gate": {"name": "vespo", "k_negative": -1.0}, "ratio": "product"}, "k_negative must be above 0"),
        ({"gate": {"name": "geometric", "low": 1.5}}, "low must lie between 0 and 1"),
        ({"gate": {"name": "clip_cov", "share": 0.0}}, "share must lie above 0"),
        ({"gate": {"name": "kl_cov", "coefficient": 0.0}}, "coefficient above 0"),
        ({"gate": {"name": "m2po", "bound": 0.0}}, "bound must be above 0"),
        ({"gate": {"name": "tv_mask", "above": 1.0}}, "above must lie between 0 and 1"),
        ({"gate": {"name": "kl_mask", "above": 0.0}}, "above must be above 0"),
    ],
)
def test_combinations_without_sense_are_refused(algo, message):
    with pytest.raises(msgspec.ValidationError, match=message):
        msgspec.convert(named(algo), AlgoConfig)


def test_tokens_without_advantage_are_computed_if_others_depend_on_them():
    assert not AlgoConfig().needs_idle_tokens
    for algo in (
        {"gate": "geometric"},
        {"gate": "m2po"},
        {"ratio": "sequence"},
        {"top_entropy": 0.5},
        {"correction": "mis"},
        {"correction": "k3_rejection"},
        {"correction": "normalised_tis"},
    ):
        assert msgspec.convert(named(algo), AlgoConfig).needs_idle_tokens, algo
    assert AlgoConfig(correction=Correction(weight="turn"), anchor="proximal").unit == "turn"


@pytest.mark.parametrize(
    ("algo", "needed"),
    [
        *(({"preset": name}, name in ("clip_cov", "kl_cov", "top_entropy")) for name in ALGORITHMS),
        ({"correction": "mis"}, False),
        ({"correction": "off_policy_mask"}, False),
        ({"correction": "normalised_tis"}, True),
        ({"correction": "k3_rejection"}, True),
        ({"kl": {"coefficient": 0.1}}, True),
        ({"entropy_bonus": 0.1}, True),
    ],
    ids=str,
)
def test_rows_without_advantage_but_with_another_gradient_are_computed(algo, needed):
    assert msgspec.convert(named(algo), AlgoConfig).needs_idle_rows == needed


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name not in ("clip_cov", "kl_cov", "top_entropy")])
def test_leaving_out_a_row_without_advantage_changes_no_gradient(name):
    rows = draw(2)
    case = {"algo": {"preset": name}, "rows": rows, "max_tokens": 7}
    idle = [number for number, row in enumerate(rows) if not any(row["advantage"])]
    assert idle, "the case has one"
    _, gradient, by_entropy, _ = computed(case)
    assert all(x == 0.0 for number in idle for x in [*gradient[number], *by_entropy[number]])
    others = [[number] for number in range(len(rows)) if number not in idle]
    _, without, _, _ = computed(case, parts=others)
    kept = [x for number, of in enumerate(gradient) if number not in idle for x in of]
    assert [x for of in without for x in of] == pytest.approx(kept, rel=1e-12)
