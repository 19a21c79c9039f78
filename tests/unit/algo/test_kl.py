"""The KL penalty beside the loss: in the reward, with a coefficient that adapts, and its settings."""

import asyncio
from dataclasses import replace

import pytest
from golden.kl import adaptive, cases
from golden.mutants import mutants

from sparring.algo.annotate.kl import KlCoefficient
from sparring.algo.annotate.trainer_quantity import ProximalShare
from sparring.algo.config import AlgoConfig
from sparring.algo.kl import Kl
from sparring.algo.shaping.kl_reward import KlReward
from sparring.errors import BadInput
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


@pytest.mark.parametrize("case", list(cases("adaptive")), ids=lambda case: case["name"])
def test_the_coefficient_adapts_as_the_references_and_survives_a_resume(case):
    config = Kl(coefficient=case["coefficient"], target=case["target"], gain=case["gain"])
    control, found = KlCoefficient(config), []
    for update in case["updates"]:
        rows = [row([0.0, 0.0], [-x / 4, -x * 3 / 4], f"t{place}#0") for place, x in enumerate(update)]
        found += [told.annotations["kl_coefficient"][2] for told in ask(control, *rows)[:1]]
        resumed = KlCoefficient(config)
        resumed.restore(control.state())
        control = resumed
    found.append(control.metrics()["kl_coefficient"])
    assert found == pytest.approx(case["coefficients"], rel=1e-9)


def test_branches_of_a_trajectory_count_as_one_sequence():
    config = Kl(coefficient=0.2, target=6.0)
    control = KlCoefficient(config)
    ask(control, row([-1.0], [-4.0], "a#0"), row([-1.0], [-4.0], "a#1"), row([-1.0], [-8.2], "b#0"))
    assert control.metrics() == {"kl_coefficient": pytest.approx(0.202), "kl_per_trajectory": pytest.approx(6.6)}


def test_the_penalty_takes_the_adapted_coefficient():
    penalised = KlReward(coefficient=0.2, target=1.0)
    control = KlCoefficient(penalised)
    first = ask(penalised, *ask(control, row([-1.0], [-3.0])))
    second = ask(penalised, *ask(control, row([-1.0], [-3.0])))
    assert [told[0].annotations["reward"][2] for told in (first, second)] == pytest.approx([-0.4, -0.4 * 1.02])


def test_rows_without_a_reference_are_refused():
    with pytest.raises(BadInput, match="annotation 'reference'"):
        ask(KlCoefficient(Kl(coefficient=0.1, target=1.0)), replace(row([-1.0], [-1.0]), annotations={}))


def test_one_coefficient_adapts():
    both = {"kl": Kl(coefficient=0.1, target=1.0), "kl_reward": KlReward(target=1.0)}
    with pytest.raises(ValueError, match="kl_reward.target must be left out with kl.target"):
        AlgoConfig(**both)
    assert AlgoConfig(kl_reward=both["kl_reward"]).adaptive is both["kl_reward"]
    assert KlCoefficient(Kl(coefficient=0.1)).metrics() == {}


def test_a_flipped_sign_in_a_reference_is_noticed():
    for line, mutant in mutants(adaptive):
        given = [(case["coefficient"], case["target"], case["gain"], case["updates"]) for case in cases("adaptive")]
        assert any(mutant(*of) != pytest.approx(adaptive(*of), rel=1e-9) for of in given), line


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"coefficient": -1.0}, "coefficient must be 0 or more"),
        ({"target": 6.0}, "target must be above 0 with a coefficient"),
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
