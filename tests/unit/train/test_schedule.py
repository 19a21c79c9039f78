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


def test_linear_reaches_its_share_at_the_last_step_and_stays():
    found = rates(total=11, schedule="linear", warmup_steps=2, min_ratio=0.1)
    assert found[:11] == pytest.approx([1.0, 2.0, *(2.0 - 1.8 * k / 8 for k in range(9))])
    assert found[10] == found[11] == pytest.approx(0.2)


def test_cosine_is_halfway_in_the_middle_and_at_its_share_at_the_last_step():
    found = rates(total=11, schedule="cosine", min_ratio=0.5)
    assert [found[0], found[5], found[10]] == pytest.approx([2.0, 1.5, 1.0])
    assert found[3] > 2.0 - 3 / 10


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize(("total", "warmup"), [(2, 0), (2, 1), (4, 3), (100, 0), (100, 99), (7, 2)])
def test_the_last_step_is_at_its_share_however_short_the_schedule(schedule, total, warmup):
    config = TrainConfig(learning_rate=2.0, schedule=schedule, min_ratio=0.25, warmup_steps=warmup)
    assert learning_rate(config, total - 1, total) == pytest.approx(0.5)
    assert max(learning_rate(config, step, total) for step in range(total)) == 2.0


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_schedule_of_one_step_is_at_its_peak(schedule):
    assert learning_rate(TrainConfig(learning_rate=2.0, schedule=schedule), 0, 1) == 2.0


def test_impossible_settings_are_refused():
    for bad in (
        {"learning_rate": 0.0},
        {"min_ratio": 2.0},
        {"token_budget": -1},
        {"beta2": 1.0},
        {"gradient_clip": -1.0},
    ):
        with pytest.raises(ValueError):
            TrainConfig(**bad)
