"""Base of losses in the user's own files. Torch-free until called."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from sparring.algo.base import NamedRule
from sparring.algo.tokens import PolicyTokens, Unit

if TYPE_CHECKING:
    import torch


class BaseLoss(NamedRule, frozen=True, kw_only=True, tag="file.py:Class"):
    """Base of the surrogates that a recipe may put in the place of ratio and gate."""

    unit: ClassVar[Unit] = "token"
    """Unit of tokens that the loss combines; tokens of one unit are in one micro-batch."""

    moves_idle_tokens: ClassVar[bool] = False
    """True if tokens with an advantage of 0 can get a gradient, or affect the gradient of other tokens of the step."""

    def __call__(self, tokens: PolicyTokens) -> torch.Tensor:
        """Compute the loss of each token, [M] with gradient; its weighted mean is minimised."""
        raise NotImplementedError(f"{type(self).__name__} needs a method __call__(self, tokens)")
