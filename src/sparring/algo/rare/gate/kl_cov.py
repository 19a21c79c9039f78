"""KL-Cov: a KL penalty on the tokens that reduce entropy most."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from sparring.algo.gate.base import BaseGate
from sparring.algo.rare.gate.covariance import covariance
from sparring.algo.tokens import Gated, PolicyTokens, RatioKind, Unit
from sparring.annotations import Annotation

if TYPE_CHECKING:
    import torch


class KlCov(BaseGate, frozen=True, kw_only=True, tag="kl_cov"):
    """r A - coefficient |log r| for the share of the step's tokens with the largest cov, r A for the others (KL-Cov,
    arXiv 2505.22617, equations 13 and 14, its divergence estimated as in its authors' code):

        cov_t = (log pi_t - mean log pi) (A_t - mean A), means over the optimiser step's tokens

    Use it against a collapse of entropy; it is gentler than `clip_cov`. Of a step's N tokens the max(1, floor(share N))
    with the largest cov are penalised. Costs a first pass over the step's tokens. The metric clip_fraction counts the
    penalised tokens whose ratio is not 1.
    """

    unit: ClassVar[Unit] = "token"
    takes: ClassVar[tuple[RatioKind, ...]] = ("token",)
    moves_idle_tokens: ClassVar[bool] = True

    share: float = 0.002
    """Share of the step's tokens that is penalised."""

    coefficient: float = 1.0
    """Penalty per nat by which a penalised token has moved."""

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1 or not self.coefficient > 0:
            actual = f"{self.share} and {self.coefficient}"
            raise ValueError(f"share must lie above 0 and at most at 1 and coefficient above 0, got {actual}")

    def __call__(self, log_ratio: torch.Tensor, tokens: PolicyTokens) -> Gated:
        chosen = tokens.annotations[Annotation.CHOSEN] > 0
        penalty = (self.coefficient * log_ratio.abs()).masked_fill(~chosen, 0.0)
        return Gated(
            surrogate=log_ratio.exp() * tokens.advantages - penalty, stopped=chosen & (log_ratio.detach() != 0)
        )

    def chosen(self, log_ratio: torch.Tensor, tokens: PolicyTokens) -> torch.Tensor:
        """Mark the penalised tokens of the step."""
        return tokens.largest(covariance(tokens), max(1, int(self.share * int(tokens.weighted.sum()))))
