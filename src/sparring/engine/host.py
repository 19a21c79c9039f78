"""Keys and values of idle conversations in host memory. Which page lies where is `kv.py`'s business."""

from __future__ import annotations

import torch

from sparring.kernels.pages import KvPages


class HostPages:
    """Room for pages of a cache: page, layer and the rest as there, so that a page lies in one piece.

    Where the cache is on a GPU the memory is pinned (unverified). Memory that was never written costs nothing.
    """

    def __init__(self, pages: KvPages, num_pages: int) -> None:
        def room(tensor: torch.Tensor) -> torch.Tensor:
            shape = (num_pages, tensor.shape[0], *tensor.shape[2:])
            return torch.empty(shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda and num_pages > 0)

        self._tensors = [room(tensor) for tensor in pages.tensors]

    def put(self, pages: KvPages, source: int, target: int) -> None:
        """Copy page `source` of the cache to page `target` here."""
        for here, there in zip(self._tensors, pages.tensors, strict=True):
            here[target].copy_(there[:, source])

    def get(self, pages: KvPages, source: int, target: int) -> None:
        """Copy page `source` from here to page `target` of the cache."""
        for here, there in zip(self._tensors, pages.tensors, strict=True):
            there[:, target] = here[source]
