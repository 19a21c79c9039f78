"""The table of stages."""

from sparring.stages.context import ORDER
from sparring.stages.pipeline import STAGES


def test_every_stage_of_the_order_has_its_function() -> None:
    assert tuple(STAGES) == ORDER and len({*STAGES.values()}) == len(ORDER)
