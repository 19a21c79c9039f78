"""Results that a backward pass computes again instead of keeping them: cheap ones, whose inputs are kept anyway."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

_NAME = "sparring_again"


class Again(NamedTuple):
    """Recipe of a tensor, which is computed once more, to the bit: `function` of `inputs`, without gradients."""

    function: Callable[..., torch.Tensor]
    inputs: tuple[torch.Tensor, ...]


def tell(result: torch.Tensor, function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
    """Return `result`, which from now on says how it is computed again. A view or a copy of it does not."""
    setattr(result, _NAME, Again(function, inputs))
    return result


def told(tensor: torch.Tensor) -> Again | None:
    """Return how a tensor is computed again; None where nobody said so."""
    again: Again | None = getattr(tensor, _NAME, None)
    return again
