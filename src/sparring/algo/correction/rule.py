"""Importance weights and rejection, for an engine that is not the trainer's own module and for stale weights.
Torch-free until called.

Shapes: M weighted tokens of a micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import msgspec

from sparring.algo.facts import Facts
from sparring.algo.tokens import PolicyTokens, Unit, bounded
from sparring.annotations import Annotation

if TYPE_CHECKING:
    import torch


@dataclass(kw_only=True, slots=True)
class Corrected:
    """Result of a correction for M tokens: the factor of each one's share of the loss, [M] without gradient.
    `columns` has, by the name of a metric, what each token adds to it, [M]."""

    weights: torch.Tensor
    columns: dict[str, torch.Tensor]


class Correction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Factor of each token's share of the loss, without gradient. With d = log(old / behaviour), `old` the trainer's
    probability of a token and `behaviour` the one that the engine recorded, its weight is

        w = exp(sum of d over the unit of `weight`; for geometric their mean over the sequence), then

        truncate   min(w, high)                     truncated importance sampling (Ionides 2008; Yao et al. 2025, "Your
                                                    efficient RL framework secretly brings you off-policy training")
        mask       w if low <= w <= high else 0     IcePop (arXiv 2510.18855), masked importance sampling
        none       w

    and, with `reject`, 0 for all tokens of a unit whose divergence exceeds `reject_above`: the mean, sum or maximum
    over `reject_unit` of

        k1 = -d        k2 = d^2 / 2        k3 = exp(d) - 1 - d        (http://joschu.net/blog/kl-approx.html)

    Mean k1 is minus the logarithm of the geometric ratio, so that `reject_below` and `reject_above` together bound that
    ratio. With `normalise` all weights are divided by their mean over the optimiser step's tokens: self-normalised
    importance sampling (Kong 1992), which trades a little bias for variance.

    `denominator` says whether tokens whose weight became 0, masked or rejected, still count. "all": they do, so that
    what is left weighs what it weighed. "kept": they do not, as if they had not been sampled; a trajectory is then as
    long as what is kept of it, and counts where anything is.

    Where the probabilities are equal every weight is exactly 1, nothing is rejected, and the loss keeps its bits.
    """

    facts: ClassVar[Facts] = Facts(
        source=(
            'truncation: Ionides 2008, Yao et al. 2025; masks: arXiv 2510.18855; rejection: Liu et al. 2025, "When '
            'speed kills stability"'
        ),
        defaults={
            "weight": "off",
            "bound": "Yao et al. 2025",
            "low": "off",
            "high": "Yao et al. 2025: C = 2",
            "reject": "off",
            "reject_unit": "Liu et al. 2025",
            "reject_by": "Liu et al. 2025: the geometric mean",
            "reject_above": (
                "ours; nobody's number: for the mask of DeepSeek-V3.2 TRL suggests 0.5 and slime has 1e-4, the paper "
                "gives none"
            ),
            "reject_below": "off",
            "only_negative": "off",
            "compare": "AReaL, arXiv 2505.24298: the proximal policy",
            "normalise": "off",
            "denominator": (
                "NeMo RL and TRL, and IcePop's equation; verl and slime leave out what is masked or rejected"
            ),
            "metrics_only": "off",
        },
        differences=("A sequence is all that was sampled in a trajectory, in whichever branch.",),
    )

    weight: Literal["none", "token", "turn", "sequence", "geometric"] = "none"
    """Unit that shares one importance weight."""

    bound: Literal["truncate", "mask", "none"] = "truncate"
    """Treatment of weights beyond the bounds."""

    low: float = 0.0
    """Below this a weight is masked."""

    high: float = 2.0
    """Above this a weight is truncated or masked."""

    reject: Literal["none", "k1", "k2", "k3"] = "none"
    """The divergence by which tokens are rejected."""

    reject_unit: Unit = "sequence"
    """Unit that is rejected as a whole."""

    reject_by: Literal["mean", "sum", "max"] = "mean"
    """Reduction of the divergences of a unit's tokens to one number."""

    reject_above: float = 0.01
    """The largest divergence that stays."""

    reject_below: float | None = None
    """The least k1 that stays, which is negative where the trainer finds the tokens likelier than the engine; None: no
    bound."""

    only_negative: bool = False
    """Reject only units of negative advantage, as DeepSeek-V3.2 does."""

    compare: Literal["before", "now"] = "before"
    """Origin of the trainer's probabilities `old`: those before the update, or of each optimiser step."""

    normalise: bool = False
    """Divide weights by their mean over the step's tokens. Costs a first pass over these."""

    denominator: Literal["all", "kept"] = "all"
    """Tokens that the loss is divided by: all, or those that were neither masked nor rejected. "kept" costs a first
    pass over the step's tokens."""

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
            got = f"{self.reject_above} and {self.reject_below}"
            raise ValueError(f"reject_above must be 0 or more and reject_below 0 or less, got {got}")
        self._check_sense()

    def _check_sense(self) -> None:
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
        """Return whether it neither weighs nor rejects."""
        return self.weight == "none" and self.reject == "none"

    def in_words(self) -> str:
        """Describe it in a few words."""
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
            old: [M], without gradient.
            tokens: the rest; their `behaviour` is what `old` is compared with.

        Returns:
            [M] weights, and of the metrics correction_weight (mean), correction_truncated (share beyond the bounds) and
            correction_rejected (share) what each token adds.
        """
        if self.does_nothing:
            return Corrected(weights=old.new_ones(len(old)), columns={})
        weights, beyond, rejected = self._of(old, tokens)
        if self.normalise:
            weights = weights / tokens.annotations[Annotation.CORRECTION_MEAN]
        columns = {
            "correction_weight": weights,
            "correction_truncated": beyond.to(weights.dtype),
            "correction_rejected": rejected.to(weights.dtype),
        }
        return Corrected(weights=old.new_ones(len(old)) if self.metrics_only else weights, columns=columns)

    def mean(self, old: torch.Tensor, tokens: PolicyTokens) -> torch.Tensor:
        """Compute the mean weight over all of an optimiser step's tokens, one number: `normalise` divides by it
        (annotation `correction_mean`). 1 where it is 0."""
        mean = tokens.average(self._of(old, tokens)[0].double())
        return mean.masked_fill(mean == 0, 1.0)

    def _of(self, old: torch.Tensor, tokens: PolicyTokens) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the weights before normalisation, which were beyond the bounds and which tokens are rejected, each
        [M]."""
        trainer = old if self.compare == "before" else tokens.logprob.detach()
        difference = bounded(trainer - tokens.behaviour)
        unbounded = self._weights(difference, tokens)
        beyond = ((unbounded > self.high) | (unbounded < self.low)) & (self.bound != "none")
        weights = unbounded.clamp(max=self.high) if self.bound == "truncate" else unbounded.masked_fill(beyond, 0.0)
        rejected = self._rejected(difference, tokens)
        return weights.masked_fill(rejected, 0.0), beyond, rejected

    def _weights(self, difference: torch.Tensor, tokens: PolicyTokens) -> torch.Tensor:
        if self.weight == "none":
            return difference.new_ones(len(difference))
        if self.weight == "geometric":
            return tokens.mean(difference, "sequence").exp()
        return bounded(tokens.sum(difference, self.weight)).exp()

    def _rejected(self, difference: torch.Tensor, tokens: PolicyTokens) -> torch.Tensor:
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
