"""Keys and values of idle conversations in host memory. Which page lies where is `kv.py`'s business."""

from __future__ import annotations

import torch

from sparring.model.kernels.pages import KvPages


class HostPages:
    """Room for pages of a cache: page, layer and the rest as there, so that a page lies in one piece.

    Where the cache is on a GPU the memory is pinned (unverified). Memory that was never written costs nothing.
    """

    def __init__(self, pages: KvPages, num_pages: int) -> None:
        def room(tensor: torch.Tensor) -> torch.Tensor:
            shape = (num_pages, tensor.shape[0], *tensor.shape[2:])
            return torch.empty(shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda and num_pages > 0)

        self._keys, self._values = room(pages.keys), room(pages.values)

    def put(self, pages: KvPages, source: int, target: int) -> None:
        """Copy page `source` of the cache to page `target` here."""
        self._keys[target].copy_(pages.keys[:, source])
        self._values[target].copy_(pages.values[:, source])

    def get(self, pages: KvPages, source: int, target: int) -> None:
        """Copy page `source` from here to page `target` of the cache."""
        pages.keys[:, target] = self._keys[source]
        pages.values[:, target] = self._values[source]
