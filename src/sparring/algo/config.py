"""Configuration of the algorithm: `[algo]` of a recipe."""

from __future__ import annotations

from typing import Literal

import msgspec


class GrpoConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Group relative policy optimisation (GRPO, arXiv 2402.03300), with the choices of DAPO (arXiv 2503.14476) and
    Dr. GRPO (arXiv 2503.20783)."""

    advantage: Literal["standard", "unnormalised"] = "standard"
    """`standard`: (reward - group mean) / (group standard deviation + epsilon). `unnormalised`: without division (Dr. GRPO)."""

    epsilon: float = 1e-6
    """Added to the standard deviation."""

    aggregation: Literal["token_mean", "sequence_mean"] = "token_mean"
    """`token_mean`: every token counts the same (DAPO). `sequence_mean`: every trajectory counts the same (GRPO)."""

    clip_low: float = 0.2
    """The probability ratio is clipped below at 1 - clip_low."""

    clip_high: float = 0.28
    """The probability ratio is clipped above at 1 + clip_high; more than clip_low leaves room to explore (DAPO's clip-higher)."""

    tis_cap: float | None = None
    """Upper bound of the importance weight of a stale token (truncated importance sampling). None: no bound."""

    zero_variance_filter: bool = True
    """Leave out groups whose rewards are all equal, which carry no signal, so that the mean is over signal only (DAPO)."""

    control: Literal["none", "shuffled"] = "none"
    """`shuffled` permutes the rewards over all rollouts of an update: an experiment's control, which must learn nothing."""

    def __post_init__(self) -> None:
        if self.epsilon <= 0:
            raise ValueError("epsilon must be above 0")
        if not 0 < self.clip_low < 1:
            raise ValueError("clip_low must lie between 0 and 1")
        if self.clip_high < self.clip_low:
            raise ValueError("clip_high must not be below clip_low")
        if self.tis_cap is not None and self.tis_cap < 1:
            raise ValueError("tis_cap must be at least 1: a fresh token has weight 1")
