"""Paged storage of keys and values, and the new rows of a call.

Shapes: G key/value heads, d head size, B sequences, L layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from sparring.errors import refusal
from sparring.kernels.memory import zeros

BLOCK = 16
"""Positions of a block in which keys are stored transposed; a page holds whole blocks."""


class PagedRows(NamedTuple):
    """New tokens of B sequences. Row cu_rows[b] + i is position context_lengths[b] - (rows of b) + i of sequence b.

    Attributes:
        block_tables: [B, P] int32, pages of each sequence in order; entries beyond the sequence are not read.
        cu_rows: [B + 1] int32; the new rows of sequence b are cu_rows[b]:cu_rows[b + 1], possibly empty.
        context_lengths: [B] int32, tokens of each sequence including the new rows.
        most_rows: maximum number of new rows of a sequence, known on the CPU; None if it has to be read from `cu_rows`.
    """

    block_tables: torch.Tensor
    cu_rows: torch.Tensor
    context_lengths: torch.Tensor
    most_rows: int | None = None


class KvHeads(NamedTuple):
    """Keys and values that a layer stores for a token; `layer` is the layer itself, or the other layer whose keys and
    values it reads."""

    num_heads: int
    head_dim: int
    layer: int

    @property
    def depth(self) -> int:
        """Return the stored size of a head: `head_dim` rounded up to whole blocks."""
        return -(-self.head_dim // BLOCK) * BLOCK

    @staticmethod
    def uniform(num_layers: int, num_heads: int, head_dim: int) -> dict[int, KvHeads]:
        """Return the heads of a model whose layers are all alike."""
        return {layer: KvHeads(num_heads, head_dim, layer) for layer in range(num_layers)}


def token_bytes(heads: Mapping[int, KvHeads], dtype: torch.dtype) -> int:
    """Return the bytes of one token's keys and values in all layers."""
    return sum(2 * h.num_heads * h.depth * dtype.itemsize for layer, h in heads.items() if h.layer == layer)


class KvPages:
    """Keys and values of a model's attention layers, in pages.

    Attributes:
        layers: keys and values of each layer by its index. Values are [pages, G, page_size, d], d rounded up to 16;
            keys are [pages, G, page_size / 16, d, 16] if `transposed` (see `ops.transposes_keys`), otherwise like
            values.
        tensors: storage of `layers`, with layers of equal shape in one tensor [L, pages, ...].

    Raises:
        BadInput: the page size is not a positive multiple of 16.
    """

    def __init__(
        self,
        heads: Mapping[int, KvHeads],
        *,
        num_pages: int,
        page_size: int = BLOCK,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        transposed: bool = True,
    ) -> None:
        if page_size <= 0 or page_size % BLOCK:
            raise refusal("page_size", f"a multiple of {BLOCK}", str(page_size), f"choose {BLOCK}, 32, 64, ...")
        self.heads, self.num_pages, self.page_size, self.dtype = dict(heads), num_pages, page_size, dtype
        self.tensors: list[torch.Tensor] = []
        alike: dict[tuple[int, int], list[int]] = {}
        for layer, (num_heads, _, owner) in self.heads.items():
            if owner == layer:
                alike.setdefault((num_heads, self.heads[layer].depth), []).append(layer)
        stored: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for (num_heads, depth), group in alike.items():
            shape = (len(group), num_pages, num_heads, page_size, depth)
            blocks = (*shape[:3], page_size // BLOCK, depth, BLOCK)
            keys, values = (_zeros(size, dtype, device) for size in (blocks if transposed else shape, shape))
            self.tensors += [keys, values]
            stored.update(zip(group, zip(keys.unbind(0), values.unbind(0), strict=True), strict=True))
        self.layers = {layer: stored[heads.layer] for layer, heads in self.heads.items()}

    @property
    def num_bytes(self) -> int:
        """Return the bytes of keys and values."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def copy_page(self, source: int, target: int) -> None:
        """Copy a page in every layer, for a sequence that continues from a shared page."""
        for tensor in self.tensors:
            tensor[:, target] = tensor[:, source]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    return zeros(shape, dtype) if torch.device(device).type == "cpu" else torch.zeros(shape, dtype=dtype, device=device)
