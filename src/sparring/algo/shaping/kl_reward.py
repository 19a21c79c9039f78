"""KL penalty in the reward of each token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from sparring.algo.base import NamedRule
from sparring.algo.kl import check_target
from sparring.annotations import Annotation
from sparring.errors import refusal
from sparring.types import Sample


class KlReward(NamedRule, frozen=True, kw_only=True, tag="kl_reward"):
    """KL in the reward: a per-token penalty in addition to the outcome.

        r_t -= coefficient * k_t        with d = log p(y_t) - log p_reference(y_t)
        k1     d
        k2     d^2 / 2
        k3     exp(-d) - 1 + d
        abs    |d|

    Ziegler et al., arXiv 1909.08593, equation 2 (k1); the estimators are Schulman's (2020). log p is the recorded
    log-probability, log p_reference the annotation `reference`. The penalty is added to the annotation `reward`, which
    credit rules count as part of a trajectory's reward (GAE and REINFORCE++ token by token); gdpo and process do not
    read it and are refused. Use it for RLHF with PPO. Implements `Annotator`; the stage runs it after the reference
    model.
    """

    coefficient: float = 0.01
    """Penalty per nat."""

    estimator: Literal["k1", "k2", "k3", "abs"] = "k1"
    """Estimate k_t of the divergence. Only k1 gives, in expectation, the gradient of the KL divergence."""

    target: float | None = None
    """Divergence in nats per trajectory that an adaptive coefficient aims at; None: the coefficient is fixed."""

    gain: float = 0.1
    """Step of an adaptive coefficient at each update: gain times the relative error, clipped to 0.2."""

    def __post_init__(self) -> None:
        if self.coefficient < 0:
            raise ValueError(f"coefficient must be at least 0, got {self.coefficient}")
        check_target(self.coefficient, self.target, self.gain)

    async def annotate(self, samples: Sequence[Sample]) -> list[Sample]:
        """Subtract the penalty in the annotation `reward`; 0.0 at tokens without policy weight. A row without the
        annotation `reference`, or without recorded log-probabilities, is refused (`BadInput`)."""
        return [self._penalise(row) for row in samples]

    def _penalise(self, row: Sample) -> Sample:
        if Annotation.REFERENCE not in row.annotations or row.logprobs is None:
            fix = "name a reference model for the stage"
            raise refusal(
                "[algo] kl_reward", "log-probabilities and an annotation 'reference'", f"none on {row.id}", fix
            )
        earned = row.annotations.get(Annotation.REWARD, (0.0,) * len(row.tokens))
        price = self.coefficient if self.target is None else max(row.annotations[Annotation.KL_COEFFICIENT])
        penalised = tuple(
            reward - price * self._estimate(own - other) if weight else 0.0
            for reward, own, other, weight in zip(
                earned, row.logprobs, row.annotations[Annotation.REFERENCE], row.weights["policy"], strict=True
            )
        )
        return row.annotated(Annotation.REWARD, penalised)

    def _estimate(self, difference: float) -> float:
        if self.estimator == "k1":
            return difference
        if self.estimator == "k2":
            return difference * difference / 2
        if self.estimator == "k3":
            return math.exp(-difference) - 1 + difference
        return abs(difference)
