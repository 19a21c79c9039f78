"""Gradients that do not depend on the number of threads, and are the same in each run on a GPU.

The gradient of a weight is a sum over rows. A library that gives each thread some of the rows adds them in an order
that depends on the number of threads. Here:

- The compiled kernels give a thread whole elements of a gradient, each one ordered sum (`linear_backward.cpp`, products
  on tiles); or they cut the rows into parts of fixed sizes, whose sums are added in order (`rows.cpp`,
  `rows_fused.cpp`, `attention_backward.cpp`, the weights of float32 products on tiles).
- One thread computes torch's matrix products in gradients, and the norm for gradient clipping (`one_thread`).
- Sums over rows in torch are additions of whole tensors, element by element (`sum_rows`).
- All other operations of torch in a backward pass compute elements or rows alone, or add rows in the order of their
  indices (embeddings, `index_select`).
- A GPU adds rows of equal index with atomic additions, in any order, in `index_add` and in the gradient of
  `index_select`; it sorts them in `index_put` and in the gradient of `x[rows]` (`add_at`, `take`).

Shapes: N rows, M columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """Make torch compute on the calling thread alone. Other threads keep their own setting."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def sum_rows(x: torch.Tensor) -> torch.Tensor:
    """Sum x[N, M] over rows -> [M] float32, by repeatedly adding one half of the rows to the other. A GPU sums with
    torch, whose order does not depend on CPU threads."""
    x = x.float()
    if x.device.type != "cpu" or not len(x):
        return x.sum(0)
    while len(x) > 1:
        half = -(-len(x) // 2)
        x = torch.cat((x[: len(x) - half] + x[half:], x[len(x) - half : half]))
    return x[0]


def take(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return x[rows] of x[N, ...], whose gradient adds rows that are taken more than once in a fixed order."""
    return x.index_select(0, rows) if x.device.type == "cpu" else x[rows]


def add_at(index: torch.Tensor, values: torch.Tensor, count: int) -> torch.Tensor:
    """Sum the rows of values[M, ...] that have equal index[M] -> [count, ...], in a fixed order."""
    zeros = values.new_zeros(count, *values.shape[1:])
    if values.device.type == "cpu":
        return zeros.index_add(0, index, values)
    return zeros.index_put((index,), values, accumulate=True)
