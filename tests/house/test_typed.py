"""No module is left out of the check of types."""

from typing import Any

import pytest
from typed import unlawful


def settings(override: dict[str, Any], strict: bool = True) -> dict[str, Any]:
    return {"tool": {"mypy": {"strict": strict, "overrides": [override]}}}


@pytest.mark.parametrize(
    ("given", "finding"),
    [
        (settings({"module": ["a.b", "a.c"], "ignore_errors": True}), "a.b, a.c"),
        (settings({"module": ["vllm"], "ignore_missing_imports": True}, strict=False), "mypy is strict"),
    ],
)
def test_what_is_left_out_is_found(given: dict[str, Any], finding: str) -> None:
    (found,) = unlawful(given)
    assert finding in found


def test_a_package_without_types_may_be_imported() -> None:
    assert not list(unlawful(settings({"module": ["vllm"], "ignore_missing_imports": True})))
