"""Memory of what a rank has alone: its shard of an optimiser, and the gradients on their way to other ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from sparring.train.blocks import stretches
from sparring.train.exchange import BUCKET

if TYPE_CHECKING:
    import torch

FLOAT = 4
"""Bytes of each number that an optimiser keeps, whatever the dtype of the model."""
MOMENTS = 2
"""Numbers of AdamW for each parameter."""


class Shard(NamedTuple):
    """Bytes of a rank's shard of an optimiser."""

    optimiser: int  # moments, and masters that are not the parameters themselves
    gradients: int  # sums of gradients


def shard(parameters: Sequence[torch.Tensor], ranks: int) -> Shard:
    """Return the largest shard of an optimiser of these parameters. A float32 parameter that is whole in a shard is its
    own master."""
    sizes = {str(number): parameter.numel() for number, parameter in enumerate(parameters)}
    shards = list[Shard]()
    for stretch_of in stretches(sizes, ranks):
        lengths = {int(name): end - begin for name, (begin, end) in stretch_of.items()}
        masters = sum(
            length
            for number, length in lengths.items()
            if parameters[number].dtype.itemsize != FLOAT or length < parameters[number].numel()
        )
        numbers = sum(lengths.values())
        shards.append(Shard((MOMENTS * numbers + masters) * FLOAT, numbers * FLOAT))
    return max(shards, default=Shard(0, 0))


def buckets(parameters: Sequence[torch.Tensor]) -> int:
    """Return the bytes of a bucket of gradients that is sent and of one that is received. A gradient that is larger
    than `BUCKET` travels alone."""
    sizes = [parameter.nbytes for parameter in parameters]
    return 2 * min(sum(sizes), max(BUCKET, *sizes, 0))
