"""The gradient of an update, expected over all that can be sampled, from the credit and the denominator that training
uses."""

import itertools
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from sparring.algo.config import AlgoConfig, named
from sparring.algo.pipeline import load_credit
from sparring.batch.batches import assemble
from sparring.batch.plain_groups import nouns, simple_group

CHANCES = (0.1, 0.5)
"""Of success, of two prompts whose answer is one token."""
MEMBERS = 4


def gradient(algo: AlgoConfig, outcomes: Sequence[tuple[int, ...]]) -> list[float]:
    """Of the objective of one update, by each prompt's chance of success, where these members succeeded."""
    groups, samples = nouns([simple_group([float(right) for right in of]) for of in outcomes])
    credit = load_credit(algo, seed=0, max_tokens=1)
    [batch] = assemble(groups, [row for rows in samples for row in rows], credit=credit, model="policy", step=1)
    found = [0.0] * len(groups)
    for row in batch.rows:
        at = next(at for at, group in enumerate(groups) if group.id == row.group)
        member = next(m for m, r in enumerate(groups[at].rollouts) if row.trajectory in {t.id for t in r.trajectories})
        chance = CHANCES[at]
        score = 1 / chance if outcomes[at][member] else -1 / (1 - chance)  # d log pi / d chance
        assert row.advantages is not None
        weighed = zip(row.advantages, row.weights["policy"], strict=True)
        found[at] += score * sum(advantage * weight for advantage, weight in weighed) / batch.denominators["policy"]
    return found


def expected(algo: AlgoConfig) -> list[float]:
    """Over all 256 outcomes of two groups."""
    total = [0.0] * len(CHANCES)
    every = list(itertools.product((0, 1), repeat=MEMBERS))
    for outcomes in itertools.product(every, repeat=len(CHANCES)):
        likely = 1.0
        for of, chance in zip(outcomes, CHANCES, strict=True):
            likely *= chance ** sum(of) * (1 - chance) ** (MEMBERS - sum(of))
        total = [all_of + likely * one for all_of, one in zip(total, gradient(algo, outcomes), strict=True)]
    return total


def config(**algo: Any) -> AlgoConfig:
    return msgspec.convert(named(algo), AlgoConfig)


@pytest.mark.parametrize(
    ("preset", "target"),
    [
        # d p / dp = 1, of the mean over two prompts
        ("rloo", [0.5, 0.5]),
        # d/dp of -sum_{k=1}^{3} (1 - p)^k / k = (1 - (1 - p)^3) / p: 2.71 and 1.75
        ("maxrl", [1.355, 0.875]),
        # a baseline of which the member is a part takes 1 / 4 off
        ("dr_grpo", [0.375, 0.375]),
    ],
)
def test_the_expected_gradient_is_that_of_the_objective(preset: str, target: list[float]) -> None:
    assert expected(config(preset=preset)) == pytest.approx(target, rel=1e-12)


@pytest.mark.parametrize(("preset", "target"), [("rloo", [0.5, 0.5]), ("maxrl", [1.355, 0.875])])
def test_the_filter_of_flat_groups_weighs_a_prompt_by_how_often_the_other_is_flat(
    preset: str, target: list[float]
) -> None:
    """A flat prompt leaves the other the whole update: 1 + 0.125 times the first's gradient, 1 + 0.6562 times the
    second's."""
    filtered = msgspec.structs.replace(config(preset=preset), zero_variance_filter=True)
    flat = [chance**MEMBERS + (1 - chance) ** MEMBERS for chance in CHANCES]
    assert expected(filtered) == pytest.approx([target[0] * (1 + flat[1]), target[1] * (1 + flat[0])], rel=1e-12)
