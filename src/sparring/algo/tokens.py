"""Policy tokens of a micro-batch, the input of ratios, gates and corrections. Torch-free: uses methods of tensors only.

Shapes: M weighted tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol, runtime_checkable

from sparring.annotations import Annotation

if TYPE_CHECKING:
    import torch

Unit = Literal["token", "turn", "sequence"]
RatioKind = Literal["token", "mean", "product"]
"""Form of a ratio: one per token, a mean over several tokens, or a product over a sequence. A product can be
arbitrarily far from 1, so no fixed clip range suits it."""
LARGEST_LOG_RATIO = 20.0
"""Bound on log ratios. exp(20) is far outside every clip range but finite in float32, so a broken log-probability shows
in the metrics instead of turning the weights into NaN."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyTokens:
    """Inputs of ratios, gates and corrections, each [M].

    Only `logprob` and `entropy` have gradients. A sequence is a trajectory with all its branches; a turn is an unbroken
    run of sampled tokens in a branch.
    """

    logprob: torch.Tensor
    """Log-probability under the current policy."""
    anchor: torch.Tensor
    """Log-probability in the denominator of the ratio."""
    behaviour: torch.Tensor
    """Log-probability that the engine recorded when it sampled the token."""
    advantages: torch.Tensor
    entropy: torch.Tensor
    weighted: torch.Tensor
    """Bool: True if the policy term weighs the token; all means and sums run over these tokens."""
    sequences: torch.Tensor
    """Int64: number of the token's sequence, from 0."""
    turns: torch.Tensor
    """Int64: number of the token's turn, from 0 over all rows."""
    annotations: Mapping[Annotation, torch.Tensor]

    @property
    def log_ratio(self) -> torch.Tensor:
        """Return log(pi / anchor) of each token, clamped to +-`LARGEST_LOG_RATIO`."""
        return bounded(self.logprob - self.anchor)

    def mean(self, values: torch.Tensor, unit: Unit) -> torch.Tensor:
        """Compute for each token the mean of values [M] over its unit, [M]; for unit "token" the values themselves."""
        if unit == "token":
            return values
        totals, index = self._totals(values, unit)
        counts, _ = self._totals(values.new_ones(len(values)), unit)
        return (totals / counts.clamp(min=1.0))[index]

    def sum(self, values: torch.Tensor, unit: Unit) -> torch.Tensor:
        """Compute for each token the sum of values [M] over its unit, [M]."""
        if unit == "token":
            return values
        totals, index = self._totals(values, unit)
        return totals[index]

    def max(self, values: torch.Tensor, unit: Unit) -> torch.Tensor:
        """Compute for each token the largest of the values [M] in its unit, [M]."""
        if unit == "token":
            return values
        index = self._index(unit)
        lowest = values.masked_fill(~self.weighted, -float("inf"))
        return values.new_full((self._count(index),), -float("inf")).scatter_reduce(0, index, lowest, "amax")[index]

    def average(self, values: torch.Tensor) -> torch.Tensor:
        """Compute the mean of values [M] over all weighted tokens, a scalar."""
        return (values * self.weighted).sum() / self.weighted.sum().clamp(min=1)

    def largest(self, values: torch.Tensor, count: int) -> torch.Tensor:
        """Mark the `count` weighted tokens with the largest values: bool [M]. Ties go to the earlier token."""
        order = values.masked_fill(~self.weighted, -float("inf")).sort(descending=True, stable=True).indices
        mask = self.weighted & False
        mask[order[:count]] = True
        return mask & self.weighted

    def _totals(self, values: torch.Tensor, unit: Unit) -> tuple[torch.Tensor, torch.Tensor]:
        from sparring.kernels.threads import add_at

        index = self._index(unit)
        return add_at(index, values * self.weighted, self._count(index)), index

    def _index(self, unit: Unit) -> torch.Tensor:
        return self.turns if unit == "turn" else self.sequences

    @staticmethod
    def _count(index: torch.Tensor) -> int:
        return int(index.max()) + 1 if len(index) else 0


def bounded(log_ratio: torch.Tensor) -> torch.Tensor:
    """Clamp a log ratio to +-`LARGEST_LOG_RATIO`."""
    return log_ratio.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)


@dataclass(kw_only=True, slots=True)
class Gated:
    """Result of a gate for M tokens.

    Attributes:
        surrogate: [M], with gradient; its weighted mean is to be maximised.
        stopped: [M] bool, tokens that the gate counts as clipped; the metric clip_fraction is their share.
    """

    surrogate: torch.Tensor
    stopped: torch.Tensor


class RatioGate(Protocol):
    """Surrogate objective of ratios and advantages, implemented in `algo/gate/`. A gate compares the ratios of tokens
    of one `unit`.

    At a ratio of 1 every token has the gradient of advantage * logprob and is not `stopped`, unless the gate's
    docstring says otherwise.
    """

    unit: ClassVar[Unit]

    def __call__(self, log_ratio: torch.Tensor, tokens: PolicyTokens) -> Gated:
        """Compute the surrogate of tokens with ratios exp(log_ratio)."""
        ...


@runtime_checkable
class StepGate(RatioGate, Protocol):
    """Gate that selects tokens among all of an optimiser step, in a first pass. In the second pass the annotation
    `chosen` is 1.0 at these tokens."""

    def chosen(self, log_ratio: torch.Tensor, tokens: PolicyTokens) -> torch.Tensor:
        """Mark the selected tokens among the step's M: bool [M]. Runs without gradient."""
        ...
