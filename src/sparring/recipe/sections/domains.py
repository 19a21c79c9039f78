"""`[envs.<name>]`: one of several environments of a run."""

from __future__ import annotations

import math

from sparring.envs.config import EnvConfig
from sparring.tasks.pools import DifficultyPools


class DomainConfig(EnvConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[envs.<name>]`: one of several environments. It has the keys of `[env]`, including limits and box, and the
    following ones."""

    weight: float = 1.0
    """Weight of the environment among those trained on, relative to the others: a share of the rollouts that remain
    after failures and filters, not of those started."""

    reward_scale: float = 1.0
    """Factor of the environment's rewards in training; evaluations report unscaled rewards."""

    places: int | None = None
    """Maximum number of the environment's concurrent rollouts, within `rollout.max_concurrent_rollouts`; None: no limit
    of its own."""

    harness: str = ""
    """Harness of the environment's rollouts; empty: `rollout.harness`."""

    pools: DifficultyPools | None = None
    """Pools of the environment's tasks; None: `[rl] pools`."""

    def __post_init__(self) -> None:
        EnvConfig.__post_init__(self)
        if not 0 <= self.weight < math.inf or not 0 < self.reward_scale < math.inf:
            raise ValueError("weight must be 0 or more, reward_scale above 0, both finite")
        if self.places is not None and self.places < 1:
            raise ValueError("places must be at least 1")
