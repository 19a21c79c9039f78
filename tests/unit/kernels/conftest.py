"""What the kernels' tests share."""

from __future__ import annotations

import pytest


@pytest.fixture
def path(kernel_path: str) -> str:
    """Every path of the run in turn."""
    return kernel_path
