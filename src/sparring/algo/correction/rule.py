"""Importance weights and rejection, for engines whose probabilities differ from the trainer's and for stale weights.
Torch-free until called.

Shapes: M weighted tokens of a micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import msgspec

from sparring.algo.tokens import PolicyTokens, Unit, bounded
from sparring.annotations import Annotation

if TYPE_CHECKING:
    import torch


@dataclass(kw_only=True, slots=True)
class Corrected:
    """Result of a correction for M tokens.

    Attributes:
        weights: [M] factor of each token's loss, without gradient.
        columns: [M] contribution of each token to a metric, by the metric's name.
    """

    weights: torch.Tensor
    columns: dict[str, torch.Tensor]


class Correction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Importance weight of each token's loss, without gradient. With d = log(old / behaviour), where `old` is the
    trainer's probability of a token and `behaviour` the one that the engine recorded, the weight is

        w = exp(sum of d over the unit of `weight`; for geometric the mean over the sequence), then

        truncate   min(w, high)                     truncated importance sampling (Ionides 2008; Yao et al. 2025, "Your
                                                    efficient RL framework secretly brings you off-policy training")
        mask       w if low <= w <= high else 0     IcePop (arXiv 2510.18855), masked importance sampling
        none       w

    and, with `reject`, 0 for all tokens of a unit whose divergence exceeds `reject_above`: the mean, sum or maximum
    over `reject_unit` of

        k1 = -d        k2 = d^2 / 2        k3 = exp(d) - 1 - d        (http://joschu.net/blog/kl-approx.html)

    The mean of k1 is minus the logarithm of the geometric-mean ratio, so `reject_below` and `reject_above` together
    bound that ratio. With `normalise` all weights are divided by their mean over the optimiser step's tokens:
    self-normalised importance sampling (Kong 1992), which trades a little bias for variance.

    `denominator` decides whether masked or rejected tokens, with weight 0, still count in the denominator of the loss.
    "all": they do, so the other tokens keep their weight. "kept": they do not, as if they had not been sampled. The
    length of a trajectory is then its number of kept tokens; without kept tokens it does not count.

    If the probabilities are equal, every weight is exactly 1, nothing is rejected, and the loss is bitwise unchanged.
    """

    weight: Literal["none", "token", "turn", "sequence", "geometric"] = "none"
    """Unit over which importance weights are formed."""

    bound: Literal["truncate", "mask", "none"] = "truncate"
    """Treatment of weights beyond the bounds: truncate them, mask their tokens, or leave them."""

    low: float = 0.0
    """Weights below this are masked."""

    high: float = 2.0
    """Weights above this are truncated or masked."""

    reject: Literal["none", "k1", "k2", "k3"] = "none"
    """Divergence estimate by which tokens are rejected."""

    reject_unit: Unit = "sequence"
    """Unit that is rejected as a whole."""

    reject_by: Literal["mean", "sum", "max"] = "mean"
    """Reduction of the divergences of a unit's tokens to one number."""

    reject_above: float = 0.01
    """Largest divergence that is not rejected."""

    reject_below: float | None = None
    """Smallest k1 that is not rejected; k1 is negative for tokens that are likelier under the trainer than under the
    engine. None: no bound."""

    only_negative: bool = False
    """Reject only units with a negative advantage, as DeepSeek-V3.2 does."""

    compare: Literal["before", "now"] = "before"
    """Weights under which the trainer computes `old`: "before" means those before the update, "now" the current ones of
    each optimiser step."""

    normalise: bool = False
    """Divide weights by their mean over the step's tokens, which costs a first pass over them."""

    denominator: Literal["all", "kept"] = "all"
    """Tokens that count in the denominator of the loss: "all", or only the "kept" ones, which are neither masked nor
    rejected. "kept" costs a first pass over the step's tokens."""

    metrics_only: bool = False
    """Measure the weights without using them: every token keeps weight 1."""

    def __post_init__(self) -> None:
        if not 0 <= self.low <= 1 <= self.high:
            equal = "the weight of equal probabilities"
            raise ValueError(
                f"low must lie from 0 to 1 and high be at least 1, {equal}, got {self.low} and {self.high}"
            )
        if self.low > 0 and self.bound != "mask":
            raise ValueError(f'low must be 0 unless bound = "mask", got {self.low} with bound = "{self.bound}"')
        if self.high != 2.0 and self.bound == "none":
            raise ValueError(f'high must be left out with bound = "none", got {self.high}')
        if not self.reject_above >= 0 or not (self.reject_below is None or self.reject_below <= 0):
            actual = f"{self.reject_above} and {self.reject_below}"
            raise ValueError(f"reject_above must be 0 or more and reject_below 0 or less, got {actual}")
        self._check_unused_settings()

    def _check_unused_settings(self) -> None:
        if self.weight == "none":
            for name, idle in (
                ("bound", self.bound == "truncate"),
                ("normalise", not self.normalise),
                ("low", self.low == 0.0),
                ("high", self.high == 2.0),
            ):
                if not idle:
                    raise ValueError(f'{name} must be left out unless weight is set, got weight = "none"')
        if self.reject == "none":
            for name, idle in (
                ("only_negative", not self.only_negative),
                ("reject_below", self.reject_below is None),
                ("reject_above", self.reject_above == 0.01),
                ("reject_unit", self.reject_unit == "sequence"),
                ("reject_by", self.reject_by == "mean"),
            ):
                if not idle:
                    raise ValueError(f'{name} must be left out unless reject is set, got reject = "none"')
        if self.reject_below is not None and self.reject != "k1":
            raise ValueError(
                'reject_below must be left out unless reject = "k1", since k2 and k3 are never negative, '
                f"got {self.reject!r}"
            )
        if self.reject != "none" and self.reject_unit == "token" and self.reject_by != "mean":
            raise ValueError(f'reject_by must be left out with reject_unit = "token", got {self.reject_by!r}')
        if self.metrics_only and self.does_nothing:
            raise ValueError("metrics_only must have a weight or a divergence to measure, got neither")
        if self.metrics_only and self.normalise:
            raise ValueError("normalise must be false with metrics_only, which does not use the weights")
        if self.denominator == "kept" and (self.metrics_only or self.bound != "mask" and self.reject == "none"):
            raise ValueError(
                'denominator must be "all" unless tokens are removed, with bound = "mask" or reject, '
                'and without metrics_only, got "kept"'
            )
        if self.denominator == "kept" and self.normalise:
            raise ValueError('denominator must be "all" with normalise, which already compensates for removed tokens')

    @property
    def units(self) -> tuple[Unit, ...]:
        """Return the units of its weights and rejections."""
        weight: Unit = "sequence" if self.weight == "geometric" else "token" if self.weight == "none" else self.weight
        return weight, "token" if self.reject == "none" else self.reject_unit

    @property
    def does_nothing(self) -> bool:
        """Return whether the rule neither weighs nor rejects."""
        return self.weight == "none" and self.reject == "none"

    def in_words(self) -> str:
        """Describe the rule in a few words."""
        if self.does_nothing:
            return "none"
        bounds = {
            "truncate": f" of at most {self.high:g}",
            "mask": f" masked outside {self.low:g} to {self.high:g}",
            "none": "",
        }
        weights = f"{self.weight} weights{bounds[self.bound]}"
        rejects = f"{self.reject_unit}s rejected above a {self.reject_by} {self.reject} of {self.reject_above:g}"
        parts = [*([weights] if self.weight != "none" else []), *([rejects] if self.reject != "none" else [])]
        parts += ["divided by what is kept"] if self.denominator == "kept" else []
        return ", ".join(parts) + (", measured only" if self.metrics_only else "")

    def __call__(self, old: torch.Tensor, tokens: PolicyTokens) -> Corrected:
        """Compute the weights of the tokens.

        Args:
            old: [M] the trainer's log-probabilities before the update, without gradient.
            tokens: tokens to weigh; `old` is compared with their `behaviour`.

        Returns:
            [M] weights, and each token's contribution to the metrics correction_weight (mean), correction_truncated
                (share beyond the bounds) and correction_rejected (share).
        """
        if self.does_nothing:
            return Corrected(weights=old.new_ones(len(old)), columns={})
        weights, beyond, rejected = self._weights_and_masks(old, tokens)
        if self.normalise:
            weights = weights / tokens.annotations[Annotation.CORRECTION_MEAN]
        columns = {
            "correction_weight": weights,
            "correction_truncated": beyond.to(weights.dtype),
            "correction_rejected": rejected.to(weights.dtype),
        }
        return Corrected(weights=old.new_ones(len(old)) if self.metrics_only else weights, columns=columns)

    def mean(self, old: torch.Tensor, tokens: PolicyTokens) -> torch.Tensor:
        """Compute the mean weight over all tokens of an optimiser step, a scalar by which `normalise` divides
        (annotation `correction_mean`). A mean of 0 becomes 1."""
        mean = tokens.average(self._weights_and_masks(old, tokens)[0].double())
        return mean.masked_fill(mean == 0, 1.0)

    def _weights_and_masks(
        self, old: torch.Tensor, tokens: PolicyTokens
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return weights before normalisation, the mask of weights beyond the bounds, and the mask of rejected tokens,
        each [M]."""
        trainer = old if self.compare == "before" else tokens.logprob.detach()
        difference = bounded(trainer - tokens.behaviour)
        unbounded = self.raw_weights(difference, tokens)
        beyond = ((unbounded > self.high) | (unbounded < self.low)) & (self.bound != "none")
        weights = unbounded.clamp(max=self.high) if self.bound == "truncate" else unbounded.masked_fill(beyond, 0.0)
        rejected = self._rejection_mask(difference, tokens)
        return weights.masked_fill(rejected, 0.0), beyond, rejected

    def raw_weights(self, difference: torch.Tensor, tokens: PolicyTokens) -> torch.Tensor:
        """Compute the weights before bounds and normalisation, [M], from d = log(old / behaviour), [M]; the method that
        a rule of your own overrides."""
        if self.weight == "none":
            return difference.new_ones(len(difference))
        if self.weight == "geometric":
            return tokens.mean(difference, "sequence").exp()
        return bounded(tokens.sum(difference, self.weight)).exp()

    def _rejection_mask(self, difference: torch.Tensor, tokens: PolicyTokens) -> torch.Tensor:
        if self.reject == "none":
            return tokens.weighted & False
        divergences = {"k1": lambda d: -d, "k2": lambda d: d * d / 2, "k3": lambda d: d.exp() - 1 - d}[self.reject](
            difference
        )
        together = getattr(tokens, self.reject_by)(divergences, self.reject_unit)
        rejected: torch.Tensor = together > self.reject_above
        if self.reject_below is not None:
            rejected = rejected | (together < self.reject_below)
        return rejected & (tokens.advantages < 0) if self.only_negative else rejected
