"""What a stage of live training says about all its steps."""

import math
from dataclasses import asdict

import pytest

from sparring.stages.runtime.totals import Totals
from sparring.types import Batch, TokenAccount

ONE = Batch(step=1, model="policy", rows=(), denominators={}, account=TokenAccount(sampled=3, filtered=3))
TIMES = {"time/overlap": 0.5, "time/step_s": 2.0}


def totals(*differences: float | None) -> Totals:
    """After one step each; None is a step in which no fresh token was trained."""
    made = Totals()
    for difference in differences:
        made.add(ONE, TIMES if difference is None else {**TIMES, "logprob_max_abs_diff": difference})
        made = Totals.of(asdict(made))  # as a resume would
    return made


@pytest.mark.parametrize(
    ("differences", "largest"),
    [((), None), ((None, None), None), ((None, 0.0), 0.0), ((0.0, None), 0.0), ((0.25, 0.5, 0.125), 0.5)],
)
def test_the_largest_difference_is_none_where_nothing_was_compared(
    differences: tuple[float | None, ...], largest: float | None
) -> None:
    assert totals(*differences).logprob_max_abs_diff == largest


def test_a_difference_that_is_no_number_is_never_forgotten() -> None:
    found = totals(0.0, math.nan, 0.0, None).logprob_max_abs_diff
    assert found is not None and math.isnan(found)


def test_counts_add_up() -> None:
    made = totals(0.0, 0.0)
    assert (made.account.sampled, made.account.filtered, made.steps, made.overlap_s) == (6, 6, 2, 2.0)
