"""The lint of rules finds a module that names one."""

import pytest
from rules import named


@pytest.mark.parametrize(
    "text", ["from sparring.algo.rare.credit.maxrl import MaxRl", "isinstance(rule, MaxRl)", "maxrl.MaxRl()"]
)
def test_a_module_that_names_a_rule_is_found(text: str) -> None:
    assert named(text) == {"MaxRl"}
