"""Memory of what a rank has alone: its shard of an optimiser, and the gradients on their way to other ranks; and of
parameters in shards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from sparring.model.layers import Product
from sparring.train.blocks import stretches
from sparring.train.exchange import BUCKET
from sparring.train.sharded_parameters import packed_parts, stages_of

if TYPE_CHECKING:
    import torch

    from sparring.model.outline import Outline

FLOAT = 4
"""Bytes of each number that an optimiser keeps, whatever the dtype of the model."""
MOMENTS = 2
"""Numbers of AdamW for each parameter."""


class Shard(NamedTuple):
    """Bytes of a rank's shard of an optimiser."""

    optimiser: int  # moments, and masters that are not the parameters themselves
    gradients: int  # sums of gradients


def shard(parameters: Sequence[torch.Tensor], ranks: int, *, apart: bool = False) -> Shard:
    """Return the largest shard of an optimiser of these parameters. A float32 parameter that is whole in a shard is its
    own master, unless masters are apart."""
    sizes = {str(number): parameter.numel() for number, parameter in enumerate(parameters)}
    shards = list[Shard]()
    for stretch_of in stretches(sizes, ranks):
        lengths = {int(name): end - begin for name, (begin, end) in stretch_of.items()}
        masters = sum(
            length
            for number, length in lengths.items()
            if apart or parameters[number].dtype.itemsize != FLOAT or length < parameters[number].numel()
        )
        numbers = sum(lengths.values())
        shards.append(Shard((MOMENTS * numbers + masters) * FLOAT, numbers * FLOAT))
    return max(shards, default=Shard(0, 0))


def buckets(parameters: Sequence[torch.Tensor]) -> int:
    """Return the bytes of a bucket of gradients that is sent and of one that is received. A gradient that is larger
    than `BUCKET` travels alone."""
    sizes = [parameter.nbytes for parameter in parameters]
    return 2 * min(sum(sizes), max(BUCKET, *sizes, 0))


class Gathering(NamedTuple):
    """Bytes of what a rank with parameters in shards gathers: its largest stage (`train.gathered`), the packed copies
    of the stage that has most, and a bucket each way of the stage's gradients."""

    parameters: int
    packed: int
    exchanged: int


def gathering(model: Outline) -> Gathering:
    """Return what a rank gathers of a model at a time."""
    parameters = {id(one): one for one in model.trained}
    stages = stages_of(model.model, {key: str(key) for key in parameters})
    of_stages = [[int(name) for name in stage] for stage in stages]
    packed = [
        sum(
            part.packed.storage.nbytes if isinstance(part, Product) else sum(one.storage.nbytes for one in part.stacks)
            for part, weight in packed_parts(model.model)
            if id(weight) in stage
        )
        for stage in of_stages[1:]  # the embedding is looked up
    ]
    return Gathering(
        max(sum(parameters[key].nbytes for key in stage) for stage in of_stages),
        max(packed),
        max(buckets([parameters[key] for key in stage]) for stage in of_stages),
    )
