"""Where the device path's tests run: on a GPU, or with TRITON_INTERPRET=1 on the CPU, in Triton's interpreter."""

import pytest
import torch

from sparring.model.kernels import ops
from sparring.model.kernels.device_path import is_interpreted


@pytest.fixture(scope="session", autouse=True)
def device():
    """The tests of this folder do not pass by not running."""
    if is_interpreted():
        ops.use("exact-device")
        yield "cpu"
        return
    if not torch.cuda.is_available():
        got = "expected a GPU and a torch built for it, got none"
        pytest.exit(f"tests/gpu: {got}; run make test-triton, which interprets the programs on a CPU", returncode=2)
    yield "cuda"
