"""What a parametrised test leaves to the full suite."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest


def short_of(values: Iterable[Any], short: Container[Any]) -> list[Any]:
    """Return all values for `parametrize`, marked `full` but for those of the short suite.

    Args:
        values: of the full suite; a tuple stands for several parameters.
        short: the values that `make test` takes too.
    """
    return [value if value in short else _full(value) for value in values]


def _full(value: Any) -> Any:
    several = value if isinstance(value, tuple) else (value,)
    return pytest.param(*several, marks=pytest.mark.full)
