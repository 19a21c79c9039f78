"""Importance weights and rejection, for an engine that is not the trainer's own module and for stale weights. Torch-free until
called.

Shapes: M weighted tokens of a micro-batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

from sparring.algo.tokens import PolicyTokens, Unit, bounded
from sparring.protocols import Corrected

if TYPE_CHECKING:
    import torch


class Correction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What each token's share of the loss is multiplied with, without gradient. With d = log(old / behaviour), `old` the
    trainer's probability of a token and `behaviour` the one that the engine recorded, its weight is

        w = exp(sum of d over the unit of `weight`; for geometric their mean over the sequence), then

        truncate   min(w, high)                     truncated importance sampling (Ionides 2008; Yao et al. 2025, "Your
                                                    efficient RL framework secretly brings you off-policy training")
        mask       w if low <= w <= high else 0     IcePop (arXiv 2510.18855), masked importance sampling

    and, with `reject`, 0 for all tokens of a unit whose divergence exceeds `reject_above`: the mean, sum or maximum over
    `reject_unit` of

        k1 = -d        k2 = d^2 / 2        k3 = exp(d) - 1 - d        (http://joschu.net/blog/kl-approx.html)

    Mean k1 is minus the logarithm of the geometric ratio, so that `reject_below` and `reject_above` together bound that ratio.
    With `normalise` all weights are divided by their mean over the optimiser step's tokens: self-normalised importance sampling
    (Kong 1992), which trades a little bias for variance.

    Where the probabilities are equal every weight is exactly 1, nothing is rejected, and the loss keeps its bits.
    """

    weight: Literal["none", "token", "turn", "sequence", "geometric"] = "none"
    """What one importance weight belongs to."""

    bound: Literal["truncate", "mask"] = "truncate"
    """What is done about weights beyond the bounds."""

    low: float = 0.0
    """Below this a weight is masked."""

    high: float = 2.0
    """Above this a weight is truncated or masked."""

    reject: Literal["none", "k1", "k2", "k3"] = "none"
    """The divergence by which tokens are rejected."""

    reject_unit: Unit = "sequence"
    """What is rejected as a whole."""

    reject_by: Literal["mean", "sum", "max"] = "mean"
    """How the divergence of a unit's tokens is one number."""

    reject_above: float = 0.01
    """The largest divergence that stays."""

    reject_below: float | None = None
    """The least k1 that stays, which is negative where the trainer finds the tokens likelier than the engine; None: no bound."""

    only_negative: bool = False
    """Whether only units of negative advantage are rejected, as DeepSeek-V3.2 does."""

    compare: Literal["before", "now"] = "before"
    """Which of the trainer's probabilities `old` are: those before the update, or of each optimiser step."""

    normalise: bool = False
    """Whether weights are divided by their mean over the step's tokens. Costs a first pass over these."""

    metrics_only: bool = False
    """Whether the weights are only measured, and every token keeps weight 1."""

    def __post_init__(self) -> None:
        if not 0 <= self.low <= 1 <= self.high:
            equal = "the weight of equal probabilities"
            raise ValueError(f"low must lie from 0 to 1 and high be at least 1, {equal}, got {self.low} and {self.high}")
        if self.low > 0 and self.bound == "truncate":
            raise ValueError(f"low is a bound of masks; with bound = \"truncate\" leave it at 0, got {self.low}")
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
                    raise ValueError(f'{name} is about weights; name a weight beside it, got weight = "none"')
        if self.reject == "none":
            for name, idle in (
                ("only_negative", not self.only_negative),
                ("reject_below", self.reject_below is None),
                ("reject_above", self.reject_above == 0.01),
                ("reject_unit", self.reject_unit == "sequence"),
                ("reject_by", self.reject_by == "mean"),
            ):
                if not idle:
                    raise ValueError(f'{name} is about what is rejected; name a divergence beside it, got reject = "none"')
        if self.reject_below is not None and self.reject != "k1":
            raise ValueError(f"reject_below is for k1 alone: k2 and k3 are never negative, got {self.reject!r}")
        if self.reject != "none" and self.reject_unit == "token" and self.reject_by != "mean":
            raise ValueError(f'reject_by is for several tokens; with reject_unit = "token" leave it, got {self.reject_by!r}')
        if self.metrics_only and self.does_nothing:
            raise ValueError("metrics_only must have a weight or a divergence to measure, got neither")
        if self.metrics_only and self.normalise:
            raise ValueError("normalise is for weights that are used; with metrics_only leave it out")

    @property
    def units(self) -> tuple[Unit, ...]:
        """What its weights and rejections are of."""
        weight: Unit = "sequence" if self.weight == "geometric" else "token" if self.weight == "none" else self.weight
        return weight, "token" if self.reject == "none" else self.reject_unit

    @property
    def does_nothing(self) -> bool:
        """Whether it neither weighs nor rejects."""
        return self.weight == "none" and self.reject == "none"

    def in_words(self) -> str:
        """What it does, short."""
        if self.does_nothing:
            return "none"
        weights = f"{self.weight} weights {'of at most' if self.bound == 'truncate' else 'masked outside'} "
        weights += f"{self.high:g}" if self.bound == "truncate" else f"{self.low:g} to {self.high:g}"
        rejects = f"{self.reject_unit}s rejected above a {self.reject_by} {self.reject} of {self.reject_above:g}"
        parts = [*([weights] if self.weight != "none" else []), *([rejects] if self.reject != "none" else [])]
        return ", ".join(parts) + (", measured only" if self.metrics_only else "")

    def __call__(self, old: torch.Tensor, tokens: PolicyTokens) -> Corrected:
        """Weights of the tokens.

        Args:
            old: [M], without gradient.
            tokens: the rest; their `behaviour` is what `old` is compared with.

        Returns:
            [M] weights, and the metrics correction_weight (mean), correction_truncated (share beyond the bounds) and
            correction_rejected (share).
        """
        if self.does_nothing:
            return Corrected(weights=old.new_ones(len(old)), metrics={})
        weights, beyond, rejected = self._of(old, tokens)
        if self.normalise:
            weights = weights / tokens.annotations["correction_mean"]
        ours, count = tokens.ours, float(tokens.ours.sum())
        metrics = {
            "correction_weight": (weights[ours].double().sum().item(), count),
            "correction_truncated": (float(beyond[ours].sum()), count),
            "correction_rejected": (float(rejected[ours].sum()), count),
        }
        return Corrected(weights=old.new_ones(len(old)) if self.metrics_only else weights, metrics=metrics)

    def mean(self, old: torch.Tensor, tokens: PolicyTokens) -> torch.Tensor:
        """The mean weight over all of an optimiser step's tokens, one number: what `normalise` divides by, in the annotation
        `correction_mean`. 1 where it is 0."""
        mean = tokens.average(self._of(old, tokens)[0].double())
        return mean.masked_fill(mean == 0, 1.0)

    def _of(self, old: torch.Tensor, tokens: PolicyTokens) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The weights before normalisation, which were beyond the bounds and which tokens are rejected, each [M]."""
        trainer = old if self.compare == "before" else tokens.logprob.detach()
        difference = bounded(trainer - tokens.behaviour)
        whole = self._weights(difference, tokens)
        beyond = (whole > self.high) | (whole < self.low)
        weights = whole.clamp(max=self.high) if self.bound == "truncate" else whole.masked_fill(beyond, 0.0)
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
            return tokens.ours & False
        each = {"k1": lambda d: -d, "k2": lambda d: d * d / 2, "k3": lambda d: d.exp() - 1 - d}[self.reject](difference)
        together = getattr(tokens, self.reject_by)(each, self.reject_unit)
        rejected = together > self.reject_above
        if self.reject_below is not None:
            rejected = rejected | (together < self.reject_below)
        return rejected & (tokens.advantages < 0) if self.only_negative else rejected


PRESETS: dict[str, dict[str, object]] = {
    "none": {},
    "tis": {"weight": "token", "high": 2.0},
    "sequence_tis": {"weight": "sequence", "high": 2.0},
    "turn_tis": {"weight": "turn", "high": 2.0},
    "normalised_tis": {"weight": "token", "high": 2.0, "normalise": True},
    "icepop": {"weight": "token", "bound": "mask", "low": 0.5, "high": 5.0},
    "token_mis": {"weight": "token", "bound": "mask", "high": 2.0},
    "mis": {"weight": "sequence", "bound": "mask", "high": 2.0},
    "geometric": {"weight": "geometric", "bound": "mask", "low": 0.999, "high": 1.002},
    "geometric_rejection": {"reject": "k1", "reject_above": 0.001, "reject_below": -0.002},
    "k3_rejection": {"reject": "k3", "reject_above": 0.01},
    "tis_k3_rejection": {"weight": "token", "high": 2.0, "reject": "k3", "reject_above": 0.01},
    "off_policy_mask": {"reject": "k1", "reject_above": 0.01, "only_negative": True, "compare": "now"},
    "metrics": {"weight": "token", "high": 2.0, "metrics_only": True},
}
"""Corrections by name. tis: Yao et al. 2025; sequence_tis, turn_tis, token_mis, mis and geometric_rejection: truncation, masks
and bounds on the geometric ratio by unit (Liu et al. 2025, "When speed kills stability"); normalised_tis: Kong 1992; icepop:
arXiv 2510.18855 and its bounds of 0.5 and 5; geometric: the bounds of NeMo RL's seq-mask-tis; k3_rejection: sequences whose
mean k3 is large, as trust region masking does (Li et al. 2026, "Trust region masking for long-horizon LLM reinforcement
learning"); off_policy_mask: DeepSeek-V3.2 (arXiv 2512.02556, section 3.1); metrics: measures what tis would do."""
