"""`[eval]` and `[export]`: evaluations during and after training, and the exported checkpoint."""

from __future__ import annotations

from typing import Literal

import msgspec


class EvalConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[eval]`: evaluation on held-out tasks, sampled at training temperature."""

    tasks: int = 0
    """Number of held-out tasks, spread evenly over the environment's datasets; 0: all."""

    no_tool_tasks: int = 0
    """Number of these tasks that are also evaluated with a disabled sandbox; 0: none."""

    checkpoints: tuple[Literal["init", "sft", "preference", "rl", "distill"], ...] = (
        "sft",
        "preference",
        "rl",
        "distill",
    )
    """Stages with weights to evaluate, if the run has them."""

    weights: Literal["auto", "best", "last"] = "auto"
    """Weights of a stage: those of its best checkpoint, or the last. `auto`: the best if `train.best_metric` is not the
    default. A best checkpoint that was chosen by an evaluation during training is biased on the same tasks."""

    teachers: bool = False
    """Evaluate each teacher of `[distill]` too, on the tasks that it teaches, and report the student's share of its
    success."""

    against: dict[str, str] = {}
    """Results to compare the last trained weights with, task by task: by name, the folder of a run (its own last
    weights) or an `evaluation.json` of `sparring eval`. The differences and their intervals are in `summary.json`."""

    samples: int = 1
    """Number of samples per task. Several give pass@k and pass^k, and narrower intervals if samples vary more than
    tasks."""

    ks: tuple[int, ...] = ()
    """Values of k for pass@k and pass^k; at most `samples`."""

    every: int = 0
    """Number of steps of rl and distill between evaluations during training, which do not delay it; 0: none."""

    every_tasks: int = 100
    """Number of held-out tasks of an evaluation during training, the first ones of `tasks`, with one sample each. 0:
    all."""

    share: float = 0.2
    """Share of the rollouts in flight, and so of a busy engine, for an evaluation during training: exactly this share,
    but at least one rollout."""

    max_lost: float = 0.05
    """Maximum share of rollouts that infrastructure or judge may break after retries; above it the evaluation fails."""

    max_concurrent_rollouts: int = 128
    """Maximum number of concurrent rollouts."""

    def __post_init__(self) -> None:
        if min(self.tasks, self.no_tool_tasks, self.every, self.every_tasks) < 0:
            raise ValueError("tasks, no_tool_tasks, every and every_tasks must be 0 or more")
        if min(self.samples, self.max_concurrent_rollouts) < 1:
            raise ValueError("samples and max_concurrent_rollouts must be at least 1")
        if not all(1 <= k <= self.samples for k in self.ks) or len(set(self.ks)) != len(self.ks):
            raise ValueError(f"ks must be different numbers from 1 to samples = {self.samples}, got {list(self.ks)}")
        if not 0 < self.share < 1:
            raise ValueError(f"share must be above 0 and below 1, got {self.share}")
        if not 0 <= self.max_lost <= 1:
            raise ValueError(f"max_lost must be a share from 0 to 1, got {self.max_lost}")


class ExportConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[export]`: a plain Hugging Face checkpoint folder."""

    weights: Literal["auto", "best", "last"] = "auto"
    """Weights of the last trained stage: those of its best checkpoint, or the last; as `eval.weights`."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of the exported weights."""
