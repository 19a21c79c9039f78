"""Policy tokens of a micro-batch, the input of ratios, gates and corrections. Torch-free: methods of tensors only.

Shapes: M weighted tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch

Unit = Literal["token", "turn", "sequence"]
RatioKind = Literal["token", "mean", "product"]
"""A ratio is each token's own, a mean over several tokens, or the product over a sequence, which no fixed range around
1 holds."""
LARGEST_LOG_RATIO = 20.0
"""exp(20) is far outside every clip range and far inside float32: a broken log-probability then shows in the metrics
instead of turning the weights into NaN."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyTokens:
    """Inputs of a ratio, a gate or a correction, each [M].

    Only `logprob` and `entropy` have gradients. A sequence is a trajectory, all its branches together; a turn is what
    the policy sampled of a branch between two pieces of context.
    """

    logprob: torch.Tensor
    """The trainer's, now."""
    anchor: torch.Tensor
    """Log-probability that the ratio is to."""
    behaviour: torch.Tensor
    """The engine's, recorded when the token was sampled."""
    advantages: torch.Tensor
    entropy: torch.Tensor
    weighted: torch.Tensor
    """bool: whether the term weighs the token; all means and sums are over these."""
    sequences: torch.Tensor
    """int64: the sequence that the token is in, from 0."""
    turns: torch.Tensor
    """int64: the turn that the token is in, from 0 over all rows."""
    annotations: Mapping[str, torch.Tensor]

    @property
    def log_ratio(self) -> torch.Tensor:
        """Return log(pi / anchor) of each token, bounded."""
        return bounded(self.logprob - self.anchor)

    def mean(self, values: torch.Tensor, unit: Unit) -> torch.Tensor:
        """Compute the mean of values [M] over the tokens of each token's unit, [M]; the values themselves for unit
        "token"."""
        if unit == "token":
            return values
        totals, index = self._totals(values, unit)
        counts, _ = self._totals(values.new_ones(len(values)), unit)
        return (totals / counts.clamp(min=1.0))[index]

    def sum(self, values: torch.Tensor, unit: Unit) -> torch.Tensor:
        """Compute the sum, likewise."""
        if unit == "token":
            return values
        totals, index = self._totals(values, unit)
        return totals[index]

    def max(self, values: torch.Tensor, unit: Unit) -> torch.Tensor:
        """Compute the largest, likewise."""
        if unit == "token":
            return values
        index = self._index(unit)
        lowest = values.masked_fill(~self.weighted, -float("inf"))
        return values.new_full((self._count(index),), -float("inf")).scatter_reduce(0, index, lowest, "amax")[index]

    def average(self, values: torch.Tensor) -> torch.Tensor:
        """Compute the mean of values [M] over all tokens, one number."""
        return (values * self.weighted).sum() / self.weighted.sum().clamp(min=1)

    def largest(self, values: torch.Tensor, count: int) -> torch.Tensor:
        """Mark the `count` tokens with the largest values [M]: bool [M]. Of equals the first; never a token that the
        term does not weigh."""
        order = values.masked_fill(~self.weighted, -float("inf")).sort(descending=True, stable=True).indices
        mask = self.weighted & False
        mask[order[:count]] = True
        return mask & self.weighted

    def _totals(self, values: torch.Tensor, unit: Unit) -> tuple[torch.Tensor, torch.Tensor]:
        index = self._index(unit)
        return values.new_zeros(self._count(index)).index_add(0, index, values * self.weighted), index

    def _index(self, unit: Unit) -> torch.Tensor:
        return self.turns if unit == "turn" else self.sequences

    @staticmethod
    def _count(index: torch.Tensor) -> int:
        return int(index.max()) + 1 if len(index) else 0


def bounded(log_ratio: torch.Tensor) -> torch.Tensor:
    """Clamp to `LARGEST_LOG_RATIO` either way."""
    return log_ratio.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)


@dataclass(kw_only=True, slots=True)
class Gated:
    """Result of a gate for M tokens: `surrogate` [M], with gradient, whose weighted mean the update raises, and
    `stopped` [M] bool, the tokens that the gate keeps from moving further."""

    surrogate: torch.Tensor
    stopped: torch.Tensor


class Ratio(Protocol):
    """Probability ratio of each token; the implementations are in `algo/ratio.py`. Tokens of one `unit` share a
    ratio."""

    unit: Unit
    kind: RatioKind

    def __call__(self, tokens: PolicyTokens) -> torch.Tensor:
        """Return the logarithm of each token's ratio [M], with gradient. Exactly 0 where logprob and anchor are
        equal."""
        ...


class RatioGate(Protocol):
    """Surrogate of ratios and advantages; the implementations are in `algo/gate/`. `unit` has the tokens whose ratios
    it looks at together. At a ratio of 1 the gradient of every
    token is that of advantage * logprob (unless the gate says otherwise in its docstring) and nothing is stopped."""

    unit: ClassVar[Unit]

    def __call__(self, log_ratio: torch.Tensor, tokens: PolicyTokens) -> Gated:
        """Compute the surrogate of tokens whose ratios are exp(log_ratio)."""
        ...


@runtime_checkable
class StepGate(RatioGate, Protocol):
    """A gate that singles tokens out among all of an optimiser step. It finds them as 1.0 in the annotation
    `chosen`."""

    def chosen(self, log_ratio: torch.Tensor, tokens: PolicyTokens) -> torch.Tensor:
        """Mark the tokens that it singles out among the step's [M]: bool [M]. Without gradient."""
        ...
