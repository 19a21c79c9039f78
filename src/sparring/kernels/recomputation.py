"""Results that a backward pass recomputes instead of storing: cheap ones whose inputs are stored anyway."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

_NAME = "sparring_again"


class Again(NamedTuple):
    """Recomputation of a tensor: `function(*inputs)`, without gradients, bitwise equal to the tensor."""

    function: Callable[..., torch.Tensor]
    inputs: tuple[torch.Tensor, ...]


def tell(result: torch.Tensor, function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
    """Attach to `result` the recomputation `function(*inputs)`, and return `result`. Views and copies of `result` have
    no recomputation."""
    setattr(result, _NAME, Again(function, inputs))
    return result


def told(tensor: torch.Tensor) -> Again | None:
    """Return the recomputation that `tell` attached to `tensor`; None if it has none, so that it has to be stored."""
    again: Again | None = getattr(tensor, _NAME, None)
    return again
