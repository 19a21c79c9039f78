"""Adaptive coefficient of the KL penalty."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

from sparring.algo.kl import Kl
from sparring.algo.shaping.kl_reward import KlReward
from sparring.annotations import Annotation
from sparring.errors import refusal
from sparring.types import Sample

LARGEST_ERROR = 0.2
"""Bound on the controller's relative error, in either direction."""


class KlCoefficient:
    """Adapts the coefficient of the KL penalty to a target divergence, and writes it as the annotation
    `kl_coefficient`. Implements `Annotator`.

    The controller of Ziegler et al., arXiv 1909.08593, changes the coefficient at every update:

        e_n = clip((KL_n - target) / target, -0.2, 0.2)        coefficient_{n + 1} = coefficient_n (1 + gain e_n)

    KL_n is the mean over the update's trajectories of the sum of log(behaviour / reference) over sampled tokens.
    Without a target in `config` the coefficient is constant.
    """

    def __init__(self, config: Kl | KlReward) -> None:
        self._config = config
        self._coefficient = config.coefficient
        self._divergence: float | None = None

    async def annotate(self, samples: Sequence[Sample]) -> Sequence[Sample]:
        """Return the rows with the current coefficient, and adapt it for the next update; a row without the annotation
        `reference` is refused (`BadInput`)."""
        annotated = [row.annotated(Annotation.KL_COEFFICIENT, self._constant_column(row)) for row in samples]
        divergences: dict[str, list[float]] = defaultdict(list)
        for row in samples:
            divergences[row.trajectory] += [own - other for own, other, weight in _logprobs_and_weights(row) if weight]
        if divergences and self._config.target is not None:
            self._divergence = math.fsum(math.fsum(costs) for costs in divergences.values()) / len(divergences)
            error = (self._divergence - self._config.target) / self._config.target
            self._coefficient *= 1 + self._config.gain * max(-LARGEST_ERROR, min(error, LARGEST_ERROR))
        return annotated

    def metrics(self) -> dict[str, float]:
        """Return kl_coefficient of the next update and kl_per_trajectory of the last; empty without a target."""
        if self._config.target is None:
            return {}
        measured = {} if self._divergence is None else {"kl_per_trajectory": self._divergence}
        return {"kl_coefficient": self._coefficient, **measured}

    def state(self) -> dict[str, float]:
        """Return the coefficient."""
        return {"coefficient": self._coefficient}

    def restore(self, state: Mapping[str, float]) -> None:
        """Restore the coefficient from `state`."""
        self._coefficient = state["coefficient"]

    def _constant_column(self, row: Sample) -> tuple[float, ...]:
        return (self._coefficient,) * len(row.tokens)


def _logprobs_and_weights(row: Sample) -> list[tuple[float, float, float]]:
    none = (0.0,) * len(row.tokens)
    if Annotation.REFERENCE not in row.annotations:
        fix = "annotate the reference first"
        raise refusal("[algo] kl", "an annotation 'reference' on every sample", f"none on {row.id}", fix)
    return list(
        zip(row.logprobs or none, row.annotations[Annotation.REFERENCE], row.weights.get("policy", none), strict=True)
    )
