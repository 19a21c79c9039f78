"""KL in the reward: every token pays for leaving the reference."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar, Literal

import msgspec

from sparring.algo.facts import Facts
from sparring.algo.kl import check_target
from sparring.annotations import Annotation
from sparring.errors import refusal
from sparring.types import Sample


class KlReward(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="kl_reward", tag_field="name"
):
    """KL in the reward: a per-token penalty beside the outcome.

        r_t -= coefficient * k_t        with d = log p(y_t) - log p_reference(y_t)
        k1     d
        k2     d^2 / 2
        k3     exp(-d) - 1 + d
        abs    |d|

    Ziegler et al., arXiv 1909.08593, equation 2 (k1); the estimators are Schulman's (2020). log p is the recorded
    log-probability, the annotation `reference` the other; the result goes into the annotation `reward`, which credit
    rules count among what a trajectory earned (GAE and REINFORCE++ token by token; gdpo and process, which do not, are
    refused). Use it for RLHF with PPO. It implements `protocols.Annotator`: the stage runs it after the reference has
    annotated.
    """

    facts: ClassVar[Facts] = Facts(
        source="arXiv 1909.08593, equation 2",
        defaults={
            "coefficient": "ours; verl's is 0.001, TRL's PPO 0.05",
            "estimator": "the paper",
            "target": "off",
            "gain": "the paper, section 2.2",
        },
        differences=(),
    )

    coefficient: float = 0.01
    """Price of one nat."""

    estimator: Literal["k1", "k2", "k3", "abs"] = "k1"
    """k1 is the only one whose mean over the reward's gradient is the gradient of the divergence."""

    target: float | None = None
    """The divergence in nats per trajectory that an adaptive coefficient holds; None: the coefficient is fixed."""

    gain: float = 0.1
    """Step of an adaptive coefficient: gain times the relative error, which is cut to a fifth, at each update."""

    def __post_init__(self) -> None:
        if self.coefficient < 0:
            raise ValueError(f"coefficient must be at least 0, got {self.coefficient}")
        check_target(self.coefficient, self.target, self.gain)

    async def annotate(self, samples: Sequence[Sample]) -> list[Sample]:
        """Return the rows with the penalty added to their annotation `reward`; 0.0 where there is no policy weight.

        Raises:
            BadInput: a sample has no annotation `reference`.
        """
        return [self._sample(row) for row in samples]

    def _sample(self, row: Sample) -> Sample:
        if Annotation.REFERENCE not in row.annotations or row.logprobs is None:
            do = "name a reference model for the stage"
            raise refusal(
                "[algo] kl_reward", "log-probabilities and an annotation 'reference'", f"none on {row.id}", do
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
