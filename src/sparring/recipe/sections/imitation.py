"""`[collect]` and `[sft]`: traces of a teacher, and learning from conversations."""

from __future__ import annotations

import msgspec

from sparring.algo.annotate.domain import ANY
from sparring.recipe.sections.overrides import TrainOverrides


class CollectConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[collect]`: traces of a teacher on the environment's training tasks, sampled as `[rollout]` says, for the sft
    stage."""

    model: str = "teacher"
    """The teacher: a name of `[models]`."""

    teachers: dict[str, str] = {}
    """Several in its place, by domain as in `[distill] teachers`."""

    tasks: int = 100
    """Training tasks, the first ones of the stream."""

    attempts: int = 1
    """Rollouts of each task."""

    min_reward: float = 1.0
    """Least reward of a conversation that is kept: its role's, where roles earn different rewards."""

    keep: int = 1
    """Most rollouts of one task whose conversations are kept, for each role, the first ones."""

    max_concurrent_rollouts: int = 32
    """Rollouts in flight."""

    def __post_init__(self) -> None:
        if min(self.tasks, self.attempts, self.keep, self.max_concurrent_rollouts) < 1:
            raise ValueError("tasks, attempts, keep and max_concurrent_rollouts must be at least 1")

    @property
    def by_domain(self) -> dict[str, str]:
        """Return the model that is collected from, by domain."""
        return self.teachers or {ANY: self.model}


class SftConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[sft]`: supervised fine-tuning on demonstrations, loss on assistant tokens only."""

    steps: int = 100
    """Optimiser steps."""

    rows_per_step: int = 64
    """Demonstrations per step, drawn in proportion to how many each dataset has."""

    train: TrainOverrides = {}
    """Keys of `[train]` that this stage replaces, such as `learning_rate`."""

    data: str | None = None
    """A file of conversations (JSON Lines, Parquet, a datasets folder) with a `messages` column, and `tools`
    where a row has others than the world; None takes what the run's collect stage has gathered, or, where it has none,
    asks the world's expert."""

    def __post_init__(self) -> None:
        if self.steps < 1 or self.rows_per_step < 1:
            raise ValueError("steps and rows_per_step must be at least 1")
