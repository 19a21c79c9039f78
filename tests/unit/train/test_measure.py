"""What an update measures, on hand-made log-probabilities."""

import math

import pytest
import torch

from sparring.batch.tensors import micro_batch
from sparring.train.measure import Measures
from sparring.types import Sample


def measures_of(trainer, engine):
    """The measures of a part of one row, all sampled by the version that trains."""
    count = len(engine)
    row = Sample(
        id="r",
        group="g",
        source="policy",
        tokens=tuple(range(count + 1)),
        weights={"policy": (0.0, *[1.0] * count)},
        logprobs=(0.0, *engine),
        versions=(-1, *[3] * count),
        kv_versions=(-1, *[3] * count),
    )
    measures = Measures(3)
    measures.add_tokens(micro_batch([row], {"policy": float(count)}), torch.tensor(trainer))
    return measures


def test_the_mismatch_by_hand():
    """Of a batch in two parts."""
    first, second = measures_of([-1.0], [-1.5]), measures_of([-2.0], [-2.0])
    first.merge(second.plain())
    found = first.result()
    weight = math.exp(0.5)
    assert (found["logprob_max_abs_diff"], found["logprob_mean_abs_diff"]) == (0.5, 0.25)
    assert found["mismatch_k3"] == pytest.approx((weight - 1.5) / 2)
    assert found["mismatch_ess"] == pytest.approx((weight + 1) ** 2 / (2 * (weight**2 + 1)))


def test_an_infinite_engine_log_probability_gives_finite_metrics():
    found = measures_of([-1.0, -2.0, -1.0], [-9999.0, -2.0, -1.0]).result()
    assert found["logprob_max_abs_diff"] == 9998.0
    assert found["mismatch_ess"] == pytest.approx(1 / 3) and math.isfinite(found["mismatch_k3"])
