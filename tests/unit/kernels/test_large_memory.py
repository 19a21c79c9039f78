"""Large pieces of memory: zeros that can be written, and that take memory only where they were."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sparring.kernels.memory import LARGE, zeros


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 3, LARGE // 100, LARGE // 7])
def test_zeros_that_can_be_written(rows: int, dtype: torch.dtype) -> None:
    made = zeros((rows, 5, 7), dtype)
    assert made.shape == (rows, 5, 7) and made.dtype is dtype and not made.any()
    assert not rows or made.data_ptr() % 64 == 0
    made += 1
    assert bool((made == 1).all()) and not zeros((rows, 5, 7), dtype).any()


def test_what_is_not_written_takes_no_memory() -> None:
    def resident() -> int:
        return (
            int(
                next(
                    line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS")
                ).split()[1]
            )
            << 10
        )

    before = resident()
    made = zeros((1 << 30,), torch.uint8)
    made[:LARGE] = 1
    assert resident() - before < 64 << 20
    del made
