"""The policy loss against its golden references: every ratio, gate, anchor, correction, divergence and aggregation."""

import functools
import random

import numpy as np
import pytest
import torch
from golden.mutants import OPERATORS, mutants
from golden.policy import answers, cases, loss, names
from golden.policy_parts import PARTS
from policy_cases import computed
from suite import short_of

NAMES = list(names())


def flat(rows):
    return np.array([x for row in rows for x in row])


def same(a, b, relative):
    """Each to its own size, or to the largest where it is nearly nothing."""
    a, b = flat(a), flat(b)
    return bool((np.abs(a - b) <= relative * np.maximum(np.abs(b), np.abs(b).max(initial=0.0))).all())


def agrees(case, relative=1e-9, dtype=torch.float64, parts=None, ours=None):
    total, gradient, by_entropy, _ = ours or computed(case, dtype, parts)
    close = abs(total - case["loss"]) <= relative * max(abs(case["loss"]), 0.1)
    return close and same(gradient, case["gradient"], relative) and same(by_entropy, case["entropy_gradient"], relative)


@pytest.mark.parametrize(("part", "name"), NAMES)
def test_loss_and_gradient_are_the_references(part, name):
    for case in cases(part, name):
        assert agrees(case), case["name"]
        assert agrees(case, 1e-5, torch.float32), case["name"]


@pytest.mark.full
@pytest.mark.parametrize(("part", "name"), NAMES)
def test_the_references_gradient_is_that_of_finite_differences(part, name):
    [case, *_] = cases(part, name, draws=1)
    at = flat([row["logprob"] for row in case["rows"]])
    for place, expected in enumerate(flat(case["gradient"])):
        moved = 1e-6 * (np.arange(len(at)) == place)
        assert (loss(case, at + moved) - loss(case, at - moved)) / 2e-6 == pytest.approx(expected, rel=1e-6, abs=1e-8)


@pytest.mark.parametrize(("part", "name"), short_of(NAMES, NAMES[::4]))
def test_the_result_is_equal_in_any_micro_batches_and_over_ranks(part, name):
    """Micro-batches and ranks are the same to the loss: parts of the rows whose losses and gradients add up."""
    for seed, case in enumerate(cases(part, name)):
        rows = list(range(len(case["rows"])))
        random.Random(seed).shuffle(rows)
        assert agrees(case, parts=[sorted(rows[:1]), sorted(rows[1:4]), sorted(rows[4:])])
        assert agrees(case, parts=[[row] for row in rows])


@pytest.mark.full
@pytest.mark.parametrize(("part", "name"), [(part, name) for part, of in PARTS.items() for name in of])
def test_a_wrong_operator_is_found(part, name):
    """Every operator of every reference, turned round, gives another answer in some case."""
    function = PARTS[part][name]
    wrong = [*mutants(function, OPERATORS)] or [("minus the whole", lambda *of: -function(*of))]
    tried = [(case, ours) for case, ours in computed_once() if name in uses(case, part)]
    for line, mutant in wrong:
        parts = {**PARTS, part: {**PARTS[part], name: mutant}}
        with np.errstate(all="ignore"):
            assert any(not agrees({**case, **answers(case, parts)}, ours=ours) for case, ours in tried), line


@functools.cache
def computed_once():
    """One case of each name and setting, with what we make of it."""
    return [(case, computed(case)) for part, name in NAMES for case in cases(part, name, draws=1)]


def uses(case, part):
    """The names of a part that a case is about."""
    algo = case["algo"]
    if part == "correction":
        return {"weigh", "rejected", "correction"} if "correction" in algo else set()
    if part == "kl":
        return {algo["kl"]["estimator"]} if "kl" in algo else set()
    default = {
        "ratio": {"name": "token"},
        "gate": {"name": "clip"},
        "anchor": "behaviour",
        "aggregation": "token_mean",
    }[part]
    chosen = algo.get(part, default)
    return {chosen if isinstance(chosen, str) else chosen["name"]}


@pytest.mark.parametrize(
    ("algo", "expected"),
    [
        ({"gate": {"name": "none"}}, (-1.2214028 + 0.8187308) / 2),
        ({"gate": {"name": "clip", "low": 0.1, "high": 0.1}}, -0.1),
        ({"gate": {"name": "dual_clip", "low": 0.1, "high": 0.1}}, -0.1),
        ({"gate": {"name": "cispo", "high": 0.1}}, (1.1 * 1.0 - 0.8187308 * 0.5) / 2),
        ({"gate": {"name": "sapo"}}, -0.2482324),
        ({"gate": {"name": "tv_mask", "above": 0.1}}, -1.2214028 / 2),
        ({"gate": {"name": "geometric"}}, 0.0),
        ({"gate": {"name": "topr"}}, (1.0 - 0.8187308 * 0.5) / 2),
        ({"gate": {"name": "m2po", "bound": 0.03}}, 0.0),
        ({"ratio": {"name": "sequence"}, "gate": {"name": "none"}}, 0.0),
        (
            {"gate": {"name": "none"}, "anchor": "proximal", "correction": {"weight": "token"}},
            (-1.2214028 + 0.8187308) / 2,
        ),
        (
            {"gate": {"name": "none"}, "kl": {"coefficient": 1.0, "estimator": "k3"}},
            (-1.2214028 + 0.8187308 + 0.0048374) / 2,
        ),
        ({"gate": {"name": "none"}, "entropy_bonus": 0.5}, (-1.2214028 + 0.8187308 - 0.5) / 2),
        ({"gate": {"name": "none"}, "top_entropy": 0.5}, -1.2214028 / 2),
        ({"gate": {"name": "none"}, "aggregation": "constant"}, (-1.2214028 + 0.8187308) / 4),
    ],
    ids=str,
)
def test_an_example_by_hand(algo, expected):
    """Two tokens; see the reference's docstring."""
    row = {
        "trajectory": "a",
        "turns": [2],
        "logprob": [-1.0, -0.5],
        "before": [-1.0, -0.5],
        "behaviour": [-1.2, -0.3],
        "reference": [-1.1, -0.5],
        "entropy": [0.6, 0.4],
        "advantage": [1.0, -1.0],
        "share": [0.0, 0.0],
    }
    case = {"algo": algo, "rows": [row], "max_tokens": 4}
    assert answers(case)["loss"] == pytest.approx(expected, abs=1e-6)
    assert computed(case)[0] == pytest.approx(expected, abs=1e-6)
