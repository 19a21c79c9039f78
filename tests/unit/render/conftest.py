"""Cases of tests of every format that are left to the full suite."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark them `full`. Tests of two formats stay whole."""
    from short_formats import is_full

    here = Path(__file__).parent
    for item in items:
        if item.path.parent == here and isinstance(item, pytest.Function):
            every = hasattr(item.module, "FORMATS") or hasattr(item.module, "FORMAT_TAGS")
            if every and is_full(item):
                item.add_marker("full")
