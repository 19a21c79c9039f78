"""Large pieces of memory: zeros that can be written, and that take memory only where they were."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sparring.kernels.memory import LARGE, give_back, zeros


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 3, LARGE // 100, LARGE // 7])
def test_zeros_that_can_be_written(rows: int, dtype: torch.dtype) -> None:
    made = zeros((rows, 5, 7), dtype)
    assert made.shape == (rows, 5, 7) and made.dtype is dtype and not made.any()
    assert not rows or made.data_ptr() % 64 == 0
    made += 1
    assert bool((made == 1).all()) and not zeros((rows, 5, 7), dtype).any()


def resident() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) << 10


def test_much_freed_memory_is_returned_to_the_system() -> None:
    pieces = [torch.ones(1 << 14) for _ in range(512)]
    last = torch.ones(1 << 10)  # above them, so that the C library keeps them when they are freed
    pieces.clear()
    held = resident()
    give_back(1 << 40)
    assert resident() > held - (16 << 20)
    give_back(1 << 20)
    assert resident() < held - (16 << 20) and bool(last.all())


def test_unwritten_memory_is_not_occupied() -> None:
    before = resident()
    made = zeros((1 << 30,), torch.uint8)
    made[:LARGE] = 1
    assert resident() - before < 64 << 20
    del made
