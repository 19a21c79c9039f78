"""What the kernels' tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from sparring.model.kernels import ops


@pytest.fixture(params=ops.path_names())
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every path of this machine in turn, and whatever was in use afterwards."""
    before, threads = ops.path_name(), torch.get_num_threads()
    ops.use(request.param)
    yield request.param
    ops.use(before)
    torch.set_num_threads(threads)
