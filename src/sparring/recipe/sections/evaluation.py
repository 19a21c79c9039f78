"""`[eval]` and `[export]`: what is measured and what is written at the end."""

from __future__ import annotations

from typing import Literal

import msgspec


class EvalConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[eval]`: held-out tasks, sampled at training temperature."""

    tasks: int = 0
    """Held-out tasks, dealt evenly over the environment's datasets; 0 takes all that it holds out."""

    no_tool_tasks: int = 0
    """Of these, how many are also tried with the tool host switched off; 0 leaves that out."""

    checkpoints: tuple[Literal["init", "sft", "preference", "rl", "distill"], ...] = (
        "sft",
        "preference",
        "rl",
        "distill",
    )
    """The stages whose weights are evaluated, where the run has them."""

    weights: Literal["auto", "best", "last"] = "auto"
    """Of these stages: those of the best checkpoint, or the last. `auto`: the best where `train.best_metric` is not its
    default. A figure of the evaluation beside training that chose them speaks well of them on these same tasks."""

    teachers: bool = False
    """Evaluate every teacher of `[distill]` too, on the tasks that it teaches, and tell what share of its success the
    student has."""

    against: dict[str, str] = {}
    """Results to compare the weights that were trained last with, task by task: by a name, the folder of a run (its own
    last weights) or an `evaluation.json` of `sparring eval`. The differences and their intervals are in
    `summary.json`."""

    samples: int = 1
    """Of each task. Several tell pass@k and pass^k, and make intervals narrower where luck matters more than the
    task."""

    ks: tuple[int, ...] = ()
    """For which k pass@k and pass^k are told; at most `samples`."""

    every: int = 0
    """Evaluate after every so many steps of rl and distill too, beside training and without holding it up; 0: never."""

    every_tasks: int = 100
    """Held-out tasks of an evaluation beside training, the first of `tasks`; one sample each. 0 takes all of them."""

    share: float = 0.2
    """Of an evaluation beside training: its share of the rollouts in flight, and so of a busy engine. It gets that much
    and takes no more; at least one rollout."""

    max_lost: float = 0.05
    """Share of rollouts that infrastructure or judge may break, retries included; with more of them the evaluation has
    failed."""

    max_concurrent_rollouts: int = 128
    """Rollouts in flight."""

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
    """Of the last stage that trained: those of its best checkpoint, or the last; as `eval.weights`."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the exported weights."""
