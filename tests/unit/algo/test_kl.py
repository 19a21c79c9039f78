"""The KL penalty beside the loss: in the reward, with a coefficient that adapts, and its settings."""

import asyncio
from dataclasses import replace

import pytest

from sparring.algo.annotate.kl import KlCoefficient, KlPenalty
from sparring.algo.annotate.loglinear import ProximalShare
from sparring.algo.kl import Kl
from sparring.errors import BadInput
from sparring.testing.golden.kl import cases
from sparring.testing.golden.mutants import mutants
from sparring.testing.golden import policy_parts
from sparring.types import Sample


def row(behaviour, reference, name="t#0", **annotations):
    """Two tokens of context, then the policy's."""
    blank = (0.0, 0.0)
    return Sample(
        id=name,
        group="g",
        source="policy",
        tokens=tuple(range(len(behaviour) + 2)),
        weights={"policy": (*blank, *[1.0] * len(behaviour))},
        logprobs=(*blank, *behaviour),
        annotations={"reference": (*blank, *reference), **annotations},
    )


def ask(annotator, *rows):
    return asyncio.run(annotator.annotate(rows))


def of(part):
    return [case for case in cases() if case["part"] == part]


@pytest.mark.parametrize("case", of("penalty"), ids=lambda case: case["name"])
def test_the_penalty_is_the_references(case):
    rule = KlPenalty(Kl(coefficient=case["coefficient"], estimator=case["estimator"], placement="reward"))
    [told] = ask(rule, row(case["behaviour"], case["reference"]))
    assert told.annotations["reward"][2:] == pytest.approx(case["rewards"], rel=1e-9)
    assert told.annotations["reward"][:2] == (0.0, 0.0)
    estimator = {"abs": "absolute"}.get(case["estimator"], case["estimator"])
    for line, mutant in mutants(getattr(policy_parts, estimator)):
        values = [-0.05 * mutant(p, q) for p, q in zip(case["behaviour"], case["reference"], strict=True)]
        assert told.annotations["reward"][2:] != pytest.approx(values, rel=1e-9), line


def test_the_penalty_by_hand():
    for estimator, cost in (("k1", 0.05), ("k2", 0.0125), ("k3", 0.01065307), ("abs", 0.05)):
        [told] = ask(KlPenalty(Kl(coefficient=0.1, estimator=estimator, placement="reward")), row([-1.0], [-1.5]))
        assert told.annotations["reward"][2] == pytest.approx(-cost, rel=1e-6)


def test_the_penalty_comes_off_what_was_earned_and_is_nothing_at_equal_probabilities():
    rule = KlPenalty(Kl(coefficient=0.1, estimator="k1", placement="reward"))
    [told] = ask(rule, row([-1.0, -2.0], [-1.0, -1.5], reward=(0.5, 0.0, 0.25, 1.0)))
    assert told.annotations["reward"] == (0.5, 0.0, 0.25, 1.05)


@pytest.mark.parametrize("case", of("adaptive"), ids=lambda case: case["name"])
def test_the_coefficient_adapts_as_the_references_and_survives_a_resume(case):
    config = Kl(coefficient=case["coefficient"], target=case["target"], gain=case["gain"], placement="reward", estimator="k1")
    control, found = KlCoefficient(config), []
    for update in case["updates"]:
        rows = [row([0.0, 0.0], [-x / 4, -x * 3 / 4], f"t{place}#0") for place, x in enumerate(update)]
        found += [told.annotations["kl_coefficient"][2] for told in ask(control, *rows)[:1]]
        resumed = KlCoefficient(config)
        resumed.restore(control.state())
        control = resumed
    found.append(control.metrics()["kl_coefficient"])
    assert found == pytest.approx(case["coefficients"], rel=1e-9)


def test_branches_of_a_trajectory_are_one():
    config = Kl(coefficient=0.2, target=6.0, placement="reward", estimator="k1")
    control = KlCoefficient(config)
    ask(control, row([-1.0], [-4.0], "a#0"), row([-1.0], [-4.0], "a#1"), row([-1.0], [-8.2], "b#0"))
    assert control.metrics() == {"kl_coefficient": pytest.approx(0.202), "kl_per_trajectory": pytest.approx(6.6)}


def test_the_penalty_takes_the_adapted_coefficient():
    config = Kl(coefficient=0.2, target=1.0, placement="reward", estimator="k1")
    control, penalised = KlCoefficient(config), KlPenalty(config)
    first = ask(penalised, *ask(control, row([-1.0], [-3.0])))
    second = ask(penalised, *ask(control, row([-1.0], [-3.0])))
    assert [told[0].annotations["reward"][2] for told in (first, second)] == pytest.approx([-0.4, -0.4 * 1.02])


def test_what_has_no_reference_is_refused():
    bare = replace(row([-1.0], [-1.0]), annotations={})
    for annotator in (KlPenalty(Kl(coefficient=0.1, placement="reward")), KlCoefficient(Kl(coefficient=0.1, target=1.0))):
        with pytest.raises(BadInput, match="annotation 'reference'"):
            ask(annotator, bare)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"coefficient": -1.0}, "coefficient must be 0 or more"),
        ({"coefficient": 0.1, "estimator": "k1"}, "estimator must be k2, k3 or abs in the loss"),
        ({"target": 6.0}, "target must be above 0 beside a coefficient"),
        ({"coefficient": 0.1, "gain": 0.0}, "gain must lie above 0"),
    ],
)
def test_settings_without_sense_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Kl(**settings)


def test_the_log_linear_share_by_hand():
    sampled = replace(row([-1.0] * 3, [-1.0] * 3), versions=(-1, -1, 4, 3, 1))
    [told] = ask(ProximalShare(lambda: 4), sampled)
    assert told.annotations["proximal_share"] == (0.0, 0.0, 0.0, 1 / 2, 3 / 4)
