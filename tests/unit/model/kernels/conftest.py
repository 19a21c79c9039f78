"""What the kernels' tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from sparring.model.kernels import ops
from sparring.model.kernels.compiled_library import COMPILED


def _in_use(name: str) -> Iterator[str]:
    before, threads = ops.path_name(), torch.get_num_threads()
    ops.use(name)
    yield name
    ops.use(before)
    torch.set_num_threads(threads)


@pytest.fixture(params=ops.path_names())
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every path of this machine in turn, and whatever was in use afterwards."""
    yield from _in_use(request.param)


@pytest.fixture(params=[name for name in ops.path_names() if name in COMPILED])
def compiled(request: pytest.FixtureRequest) -> Iterator[str]:
    """Those that are compiled."""
    yield from _in_use(request.param)
