"""`[envs.<name>]`: one of several environments of a run."""

from __future__ import annotations

import math

from sparring.envs.config import EnvConfig
from sparring.tasks.pools import DifficultyPools


class DomainConfig(EnvConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[envs.<name>]`: one of several environments. It has every key of `[env]`, limits and box included, and these."""

    weight: float = 1.0
    """Share of what is trained, relative to the weights of the others: of the rollouts that failures and filters leave,
    not of those that are begun."""

    reward_scale: float = 1.0
    """Factor of its rewards in training; evaluations tell them as they are."""

    places: int | None = None
    """Most of its rollouts that run at once, within `rollout.max_concurrent_rollouts`; None: as many as that."""

    harness: str = ""
    """Harness of its rollouts; empty: `rollout.harness`."""

    pools: DifficultyPools | None = None
    """Pools of its tasks; None: those of `[rl]`."""

    def __post_init__(self) -> None:
        EnvConfig.__post_init__(self)
        if not 0 <= self.weight < math.inf or not 0 < self.reward_scale < math.inf:
            raise ValueError("weight must be 0 or more, reward_scale above 0, both finite")
        if self.places is not None and self.places < 1:
            raise ValueError("places must be at least 1")
