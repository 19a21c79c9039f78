"""Paged storage for keys and values, and which new rows a call brings. G key/value heads, d head size, B sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from sparring.errors import refusal
from sparring.model.kernels.memory import zeros

BLOCK = 16
"""Keys are stored transposed in blocks of so many positions; a page holds whole blocks."""


class PagedRows(NamedTuple):
    """The new tokens of B sequences. Row cu_rows[b] + i is position context_lengths[b] - (rows of b) + i of sequence b.

    block_tables [B, P] int32: pages of each sequence in order; entries past its length are not read.
    cu_rows [B + 1] int32: the new rows of sequence b are cu_rows[b]:cu_rows[b + 1]; none is allowed.
    context_lengths [B] int32: tokens of each sequence after the new rows are appended.
    most_rows: the most new rows of one sequence, which a device would have to be asked for; None: it is.
    """

    block_tables: torch.Tensor
    cu_rows: torch.Tensor
    context_lengths: torch.Tensor
    most_rows: int | None = None


class KvPages:
    """Keys and values of `num_pages` pages of `page_size` positions for the layers of a model that attend.

    values [layers, pages, G, page_size, d], d rounded up to 16; keys [layers, pages, G, page_size / 16, d, 16], or, where
    they are not `transposed`, like the values: see `ops.transposes_keys`. `layers` has them by the layer's index in the model.

    Raises:
        BadInput: the page size is not a positive multiple of 16.
    """

    def __init__(
        self,
        *,
        attending: Sequence[int],
        num_pages: int,
        page_size: int = BLOCK,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        transposed: bool = True,
    ) -> None:
        if page_size <= 0 or page_size % BLOCK:
            raise refusal("page_size", f"a multiple of {BLOCK}", str(page_size), f"choose {BLOCK}, 32, 64, ...")
        self.num_pages, self.page_size = num_pages, page_size
        self.num_kv_heads, self.head_dim, self.dtype = num_kv_heads, head_dim, dtype
        depth = -(-head_dim // BLOCK) * BLOCK
        per_layer = (len(attending), num_pages, num_kv_heads)
        shape = (*per_layer, page_size, depth)
        self.values = _zeros(shape, dtype, device)
        self.keys = _zeros((*per_layer, page_size // BLOCK, depth, BLOCK) if transposed else shape, dtype, device)
        self.layers = dict(zip(attending, zip(self.keys.unbind(0), self.values.unbind(0), strict=True), strict=True))

    @property
    def num_bytes(self) -> int:
        """Bytes of keys and values together."""
        return self.keys.nbytes + self.values.nbytes

    def copy_page(self, source: int, target: int) -> None:
        """Copy a page in every layer: for a sequence that goes on from a page it shares."""
        self.keys[:, target] = self.keys[:, source]
        self.values[:, target] = self.values[:, source]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    return zeros(shape, dtype) if torch.device(device).type == "cpu" else torch.zeros(shape, dtype=dtype, device=device)
