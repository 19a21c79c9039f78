"""`[collect]` and `[sft]`: traces of a teacher, and supervised fine-tuning on conversations."""

from __future__ import annotations

import msgspec

from sparring.algo.annotate.domain import ANY
from sparring.recipe.sections.overrides import TrainOverrides


class CollectConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[collect]`: collection of a teacher's traces on the environment's training tasks for the sft stage, with the
    sampling of `[rollout]`."""

    model: str = "teacher"
    """Teacher: a name of `[models]`."""

    teachers: dict[str, str] = {}
    """Several teachers instead, by domain as in `[distill] teachers`."""

    tasks: int = 100
    """Number of training tasks, from the start of the stream."""

    attempts: int = 1
    """Number of rollouts per task."""

    min_reward: float = 1.0
    """Minimum reward of a kept conversation; if roles have rewards of their own, the reward of its role."""

    keep: int = 1
    """Maximum number of rollouts of a task with kept conversations, per role; the first ones are kept."""

    max_concurrent_rollouts: int = 32
    """Maximum number of concurrent rollouts."""

    def __post_init__(self) -> None:
        if min(self.tasks, self.attempts, self.keep, self.max_concurrent_rollouts) < 1:
            raise ValueError("tasks, attempts, keep and max_concurrent_rollouts must be at least 1")

    @property
    def by_domain(self) -> dict[str, str]:
        """Teachers by domain."""
        return self.teachers or {ANY: self.model}


class SftConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[sft]`: supervised fine-tuning on demonstrations, with the loss on assistant tokens only."""

    steps: int = 100
    """Number of optimiser steps."""

    rows_per_step: int = 64
    """Number of demonstrations per step, drawn from datasets in proportion to their size."""

    train: TrainOverrides = {}
    """Keys of `[train]` that this stage replaces, such as `learning_rate`."""

    data: str | None = None
    """File of conversations (JSON Lines, Parquet, a datasets folder) with a `messages` column, and `tools` if a row's
    differ from the world's. None: the traces of the run's collect stage, or without one the demonstrations of the
    world's expert."""

    def __post_init__(self) -> None:
        if self.steps < 1 or self.rows_per_step < 1:
            raise ValueError("steps and rows_per_step must be at least 1")
