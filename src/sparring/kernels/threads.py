"""Why no gradient depends on how many threads compute it.

The gradient of a weight is a sum over rows. A library that gives each thread some of the rows adds them up in another
order when there are other threads. Here, whatever computes:

- The compiled kernels give a thread whole elements of a gradient, each an ordered sum that nobody divides
  (`linear_backward.cpp`, products on tiles); or cut the rows into parts of fixed sizes, whose sums are added in order
  (`rows.cpp`, `rows_fused.cpp`, `attention_backward.cpp`, the weights of float32 products on tiles).
- torch's matrix products in gradients, and the norm that they are clipped by, are computed by one thread
(`one_thread`). - torch's sums over rows are additions of whole tensors, element by element (`sum_rows`). - Everything
else of torch's in a backward pass computes elements or rows alone, or adds rows in the order of their indices
  (embeddings, `index_select`).

N rows, M columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute on the calling thread alone. Other callers keep their threads: torch counts for each of
    them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def sum_rows(x: torch.Tensor) -> torch.Tensor:
    """Sums [M] float32 of the columns of x[N, M]: the lower half of the rows is added to the upper one, again and
    again. On a device they are torch's, which no thread of the processor divides."""
    x = x.float()
    if x.device.type != "cpu" or not len(x):
        return x.sum(0)
    while len(x) > 1:
        half = -(-len(x) // 2)
        x = torch.cat((x[: len(x) - half] + x[half:], x[len(x) - half : half]))
    return x[0]
