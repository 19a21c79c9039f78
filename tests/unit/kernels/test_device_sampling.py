"""Truncation on a device, run on the CPU: kept sets that are read, and the sums that decide them."""

import pytest
import torch

from sparring.kernels.device.sampling import kept_of, running_sum

VOCABULARY = 3000


@pytest.mark.parametrize("ids", [[3, 3], [5, 4], [-1, 2], [2, VOCABULARY]])
def test_ids_that_do_not_ascend_within_the_vocabulary_are_found(ids):
    offsets, both = torch.tensor([0, 2, 4]), torch.tensor([1, 2, *ids], dtype=torch.int32)
    _, wrong = kept_of((offsets, both), torch.Size((2, VOCABULARY)))
    assert wrong.tolist() == [False, True]


@pytest.mark.parametrize("width", [1, 2, 1000, 1024, 1025, 5000])
def test_running_sums_are_sums(width):
    x = torch.rand(3, width, dtype=torch.float64)
    assert torch.allclose(running_sum(x), x.cumsum(1), rtol=1e-13)
