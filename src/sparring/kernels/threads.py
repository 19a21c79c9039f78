"""Gradients that do not depend on the number of threads.

The gradient of a weight is a sum over rows. A library that gives each thread some of the rows adds them in an order
that depends on the number of threads. Here:

- The compiled kernels give a thread whole elements of a gradient, each one ordered sum (`linear_backward.cpp`, products
  on tiles); or they cut the rows into parts of fixed sizes, whose sums are added in order (`rows.cpp`,
  `rows_fused.cpp`, `attention_backward.cpp`, the weights of float32 products on tiles).
- One thread computes torch's matrix products in gradients, and the norm for gradient clipping (`one_thread`).
- Sums over rows in torch are additions of whole tensors, element by element (`sum_rows`).
- All other operations of torch in a backward pass compute elements or rows alone, or add rows in the order of their
  indices (embeddings, `index_select`).

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
