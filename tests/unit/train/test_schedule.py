"""Learning rates, by hand."""

import pytest

from sparring.train.config import TrainConfig
from sparring.train.optimiser import learning_rate


def rates(total=10, **settings):
    config = TrainConfig(learning_rate=2.0, **settings)
    return [learning_rate(config, step, total) for step in range(total + 2)]


def test_constant_after_a_linear_warmup():
    assert rates(warmup_steps=4)[:6] == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]
    assert set(rates()) == {2.0}


def test_linear_reaches_its_share_at_the_end_and_stays():
    found = rates(schedule="linear", warmup_steps=2, min_ratio=0.1)
    assert found[2:11:4] == pytest.approx([2.0, 1.1, 0.2])
    assert found[11] == found[10]


def test_cosine_is_halfway_in_the_middle():
    found = rates(schedule="cosine", min_ratio=0.5)
    assert [found[0], found[5], found[10]] == pytest.approx([2.0, 1.5, 1.0])
    assert found[3] > 2.0 - 3 / 10


def test_impossible_settings_are_refused():
    for bad in (
        {"learning_rate": 0.0},
        {"min_ratio": 2.0},
        {"token_budget": 0},
        {"beta2": 1.0},
        {"gradient_clip": -1.0},
    ):
        with pytest.raises(ValueError):
            TrainConfig(**bad)
