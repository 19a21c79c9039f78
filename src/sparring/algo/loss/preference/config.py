"""Configurations of the preference losses. Torch-free."""

from __future__ import annotations

from sparring.algo.base import NamedRule


class DpoConfig(NamedRule, frozen=True, kw_only=True, tag="dpo"):
    """Direct preference optimisation (arXiv 2305.18290, equation 7).

        r = beta * (log pi(y|x) - log reference(y|x)),    m = r(chosen) - r(rejected)
        loss = -(1 - label_smoothing) * log sigmoid(m) - label_smoothing * log sigmoid(-m)

    The first choice for pairs. With label smoothing (Mitchell 2023) the margins stay finite, as if a share of the
    labels were wrong.
    """

    beta: float = 0.1
    """Strength of the implicit KL constraint: a larger value keeps the policy nearer to the reference."""
    label_smoothing: float = 0.0
    """Assumed share of swapped labels (conservative DPO)."""

    def __post_init__(self) -> None:
        _positive(beta=self.beta)
        if not 0 <= self.label_smoothing < 0.5:
            raise ValueError(f"label_smoothing must be 0 or more and below 0.5, got {self.label_smoothing}")


class RobustDpoConfig(NamedRule, frozen=True, kw_only=True, tag="robust_dpo"):
    """DPO, unbiased under labels that are swapped at a known rate (arXiv 2403.00409).

        loss = (-(1 - flip_rate) * log sigmoid(m) + flip_rate * log sigmoid(-m)) / (1 - 2 * flip_rate),    m as in dpo

    Use it if the error rate of the labels is known, such as from judges that were asked twice.
    """

    beta: float = 0.1
    """Strength of the implicit KL constraint: a larger value keeps the policy nearer to the reference."""
    flip_rate: float = 0.1
    """Share of swapped labels in the data."""

    def __post_init__(self) -> None:
        _positive(beta=self.beta)
        if not 0 <= self.flip_rate < 0.5:
            raise ValueError(f"flip_rate must be 0 or more and below 0.5, got {self.flip_rate}")


class IpoConfig(NamedRule, frozen=True, kw_only=True, tag="ipo"):
    """Identity preference optimisation (arXiv 2310.12036, equation 17).

        r = log pi(y|x) - log reference(y|x),    loss = (r(chosen) - r(rejected) - 1 / (2 * beta))^2

    Use it if preferences are nearly deterministic: the margin has a target, while DPO's grows without bound.
    """

    beta: float = 0.1
    """The paper's tau; the target of the margin is 1 / (2 beta)."""
    length_averaged: bool = False
    """Average log-ratios over tokens, as common implementations do. False: sum them, as in the paper."""

    def __post_init__(self) -> None:
        _positive(beta=self.beta)


class KtoConfig(NamedRule, frozen=True, kw_only=True, tag="kto"):
    """Kahneman-Tversky optimisation (arXiv 2402.01306, equation 8) of single labelled replies; a pair counts as two.

        r = log pi(y|x) - log reference(y|x),    z = max(0, mean of r over replies to other prompts)
        loss = wanted * (1 - sigmoid(beta * (r - z))) or unwanted * (1 - sigmoid(beta * (z - r)))

    Use it if replies are rated one by one, or if wanted replies far outnumber unwanted ones: then give the rarer kind
    more weight.
    """

    beta: float = 0.1
    """Strength of the implicit KL constraint: a larger value keeps the policy nearer to the reference."""
    wanted: float = 1.0
    """Weight of a wanted reply."""
    unwanted: float = 1.0
    """Weight of an unwanted reply."""

    def __post_init__(self) -> None:
        _positive(beta=self.beta, wanted=self.wanted, unwanted=self.unwanted)


class SimPoConfig(NamedRule, frozen=True, kw_only=True, tag="simpo"):
    """Simple preference optimisation (arXiv 2405.14734, equation 6), without a reference.

        r = beta * log pi(y|x) / length(y),    loss = -log sigmoid(r(chosen) - r(rejected) - gamma)

    Use it if the reward should match the mean log-probability that generation maximises, and long replies should not
    win by length.
    """

    beta: float = 2.0
    """Scale of mean log-probabilities."""
    gamma: float = 1.0
    """Target of the margin."""

    def __post_init__(self) -> None:
        _positive(beta=self.beta)
        if self.gamma < 0:
            raise ValueError(f"gamma must be 0 or more, got {self.gamma}")


class OrpoConfig(NamedRule, frozen=True, kw_only=True, tag="orpo"):
    """Odds ratio preference optimisation (arXiv 2403.07691, equations 6 and 7), without a reference, added to imitation
    of the chosen reply.

        r = log odds of exp(log pi(y|x) / length(y))
        loss = imitation - strength * log sigmoid(r(chosen) - r(rejected))

    Use it instead of supervised fine-tuning: one stage from a base model.
    """

    strength: float = 0.1
    """Weight of the preference part; the paper's lambda."""

    def __post_init__(self) -> None:
        _positive(strength=self.strength)


PreferenceLoss = DpoConfig | RobustDpoConfig | IpoConfig | KtoConfig | SimPoConfig | OrpoConfig

ComparingLoss = DpoConfig | RobustDpoConfig | IpoConfig | SimPoConfig
"""Losses that need two replies to one prompt and nothing else."""

WITHOUT_REFERENCE = (SimPoConfig, OrpoConfig)
"""Losses without a reference model."""


def _positive(**values: float) -> None:
    for name, value in values.items():
        if value <= 0:
            raise ValueError(f"{name} must be above 0, got {value}")
