"""Where the device path's tests run: on a GPU, or with TRITON_INTERPRET=1 on the CPU, in Triton's interpreter."""

import numpy as np
import pytest
import torch

from sparring.kernels import ops
from sparring.kernels.device.path import is_interpreted


@pytest.fixture(scope="session", autouse=True)
def device():
    """The tests of this folder do not pass by not running."""
    if is_interpreted():
        if not rows_are_alike():
            got = "expected numpy's products to give a row the same bits at every place, got others"
            pytest.exit(f"tests/gpu: {got}; run make test-triton, which sets OPENBLAS_CORETYPE", returncode=2)
        ops.use("exact-device")
        yield "cpu"
        return
    if not torch.cuda.is_available():
        got = "expected a GPU and a torch built for it, got none"
        pytest.exit(f"tests/gpu: {got}; run make test-triton, which interprets the programs on a CPU", returncode=2)
    yield "cuda"


def rows_are_alike():
    """Whether a row of numpy's product, which stands for a tile's, has the same bits at every place."""
    draw = np.random.default_rng(0)
    row, weight = (draw.standard_normal(shape).astype(np.float32) for shape in ((1, 64), (64, 64)))
    return not np.ptp(np.repeat(row, 64, axis=0) @ weight, axis=0).any()
