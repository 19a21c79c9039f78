"""Configuration of KTO. Torch-free."""

from __future__ import annotations

from typing import ClassVar

from sparring.algo.base import NamedRule, check_positive


class KtoConfig(NamedRule, frozen=True, kw_only=True, tag="kto"):
    """Kahneman-Tversky optimisation (arXiv 2402.01306, equation 8) of single labelled replies; a pair counts as two.

        r = log pi(y|x) - log reference(y|x),    z = max(0, mean of r over replies to other prompts)
        loss = wanted * (1 - sigmoid(beta * (r - z))) or unwanted * (1 - sigmoid(beta * (z - r)))

    Use it if replies are rated one by one, or if wanted replies far outnumber unwanted ones: then give the rarer kind
    more weight.
    """

    has_reference: ClassVar[bool] = True

    beta: float = 0.1
    """Strength of the implicit KL constraint: a larger value keeps the policy nearer to the reference."""
    wanted: float = 1.0
    """Weight of a wanted reply."""
    unwanted: float = 1.0
    """Weight of an unwanted reply."""

    def __post_init__(self) -> None:
        check_positive(beta=self.beta, wanted=self.wanted, unwanted=self.unwanted)
