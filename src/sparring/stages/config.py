"""What a run is and what each stage does. Torch-free."""

from __future__ import annotations

from typing import Literal

import msgspec

from sparring.algo.loss.preference.config import ComparingLoss, DpoConfig, OrpoConfig, PreferenceLoss
from sparring.train.config import TrainConfig

MAX_THREADS = 1024
"""More than any one machine has a use for; the threading library ends the process where it cannot start them."""

NAMED = {("preference", "loss"): "dpo", ("reward_model", "loss"): "bradley_terry", ("rl", "preference"): "dpo"}
"""Tables of several kinds, and the kind of one that does not say its name; a name alone stands for a table of defaults."""

StageName = Literal["init", "sft", "preference", "reward_model", "rl", "eval", "export"]


class RunSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[run]`: what this run is called, where it lives and what it consists of."""

    name: str
    """The run's folder is `<directory>/<name>`."""

    directory: str = "runs"
    """Folder of all runs."""

    seed: int = 0
    """Everything random in the run derives from it."""

    stages: tuple[StageName, ...] = ("init", "sft", "rl", "eval", "export")
    """In this order; a stage that is already done in the run's folder is not repeated."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto`, `cpu` or `cuda`."""

    threads: int = 0
    """CPU threads of the trainer and of the engine each; 0 takes every core."""

    cluster: Literal["inline"] = "inline"
    """Which process runs where."""

    def __post_init__(self) -> None:
        if self.name in ("", ".", "..") or "/" in self.name or "\0" in self.name:
            raise ValueError(f"name must be one folder name, got {self.name!r}")
        if len(set(self.stages)) != len(self.stages):
            raise ValueError(f"stages must not repeat, got {list(self.stages)}")
        if not 0 <= self.threads <= MAX_THREADS:
            raise ValueError(f"threads must be 0 (all) to {MAX_THREADS}, got {self.threads}")


class SftConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[sft]`: supervised fine-tuning on demonstrations, loss on assistant tokens only."""

    steps: int = 100
    """Optimiser steps."""

    rows_per_step: int = 64
    """Demonstrations per step, drawn in proportion to how many each dataset has."""

    train: dict[str, int | float | str | bool] = {}
    """Keys of `[train]` that this stage replaces, such as `learning_rate`."""

    data: str | None = None
    """A file of conversations (JSON Lines, Parquet, a datasets folder) with a `messages` column; None asks the world's expert."""

    def __post_init__(self) -> None:
        if self.steps < 1 or self.rows_per_step < 1:
            raise ValueError("steps and rows_per_step must be at least 1")
        _check_overrides(self.train)


class PreferenceConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[preference]`: the policy learns from replies that somebody compared or labelled."""

    data: str | None = None
    """A file (JSON Lines, Parquet, a datasets folder) of {prompt or messages, chosen, rejected}; with kto also of {prompt or
    messages, completion, label}."""

    held_out: int = 0
    """At least that many rows, whole prompts, are not trained but judged at the end; 0: none."""

    loss: PreferenceLoss = DpoConfig()
    """The algorithm, by `name`."""

    imitate: float | None = None
    """What the negative log-likelihood of chosen replies counts beside the loss; None: as papers have it, 1 with orpo, else 0."""

    steps: int = 100
    """Optimiser steps."""

    rows_per_step: int = 64
    """Pairs per step; labelled replies with kto."""

    train: dict[str, int | float | str | bool] = {}
    """Keys of `[train]` that this stage replaces, such as `learning_rate`."""

    @property
    def imitates(self) -> float:
        """`imitate`, decided."""
        return float(isinstance(self.loss, OrpoConfig)) if self.imitate is None else self.imitate

    def __post_init__(self) -> None:
        if self.steps < 1 or self.rows_per_step < 1 or self.held_out < 0:
            raise ValueError("steps and rows_per_step must be at least 1, held_out not below 0")
        if self.imitates < 0:
            raise ValueError(f"imitate must be 0 or more, got {self.imitate}")
        if isinstance(self.loss, OrpoConfig) and not self.imitates:
            raise ValueError("imitate must be above 0 with orpo, which by itself only compares; leave it out")
        _check_overrides(self.train)


class BradleyTerryConfig(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="name", tag="bradley_terry"
):
    """The chosen text is worth more (arXiv 2203.02155)."""

    centre: float = 0.0
    """What the square of the sum of a pair's rewards counts: holds rewards near zero (arXiv 2312.09244)."""

    def __post_init__(self) -> None:
        if self.centre < 0:
            raise ValueError(f"centre must be 0 or more, got {self.centre}")


class StepsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="name", tag="steps"):
    """Each step of a solution is right or not (arXiv 2305.20050)."""

    separator: str = "\n"
    """What stands between two steps."""


class RewardModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[reward_model]`: a scalar head on the policy's weights learns what replies, or their steps, are worth."""

    data: str | None = None
    """A file of {prompt or messages, chosen, rejected, margin?}; with `steps` of {prompt or messages, steps, labels}."""

    held_out: int = 0
    """At least that many rows, whole prompts, are not trained but judged at the end; 0: none."""

    loss: BradleyTerryConfig | StepsConfig = BradleyTerryConfig()
    """What is learned, by `name`."""

    steps: int = 100
    """Optimiser steps."""

    rows_per_step: int = 64
    """Pairs or solutions per step."""

    train: dict[str, int | float | str | bool] = {}
    """Keys of `[train]` that this stage replaces, such as `learning_rate`."""

    def __post_init__(self) -> None:
        if self.steps < 1 or self.rows_per_step < 1 or self.held_out < 0:
            raise ValueError("steps and rows_per_step must be at least 1, held_out not below 0")
        _check_overrides(self.train)


class RlConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[rl]`: reinforcement learning over live rollouts."""

    steps: int = 100
    """Updates: each is made of fresh groups and publishes weights."""

    groups_per_step: int = 16
    """Tasks per step."""

    train: dict[str, int | float | str | bool] = {}
    """Keys of `[train]` that this stage replaces, such as `learning_rate`."""

    minibatches: int = 1
    """Optimiser steps that a pass over a step's groups is made of; weights are published after the last."""

    passes: int = 1
    """How often every sampled token is trained before its weights are published."""

    preference: ComparingLoss | None = None
    """Online preference optimisation in the place of `[algo]`: the best rollout of each group against its worst; the reference is
    what the stage begins with."""

    reward_model: str | None = None
    """Who scores rollouts beside the world: `reward_model`, what that stage of this run has written, or a name in `[models]`."""

    reward_weight: float = 1.0
    """What the reward model's rewards are multiplied with before they are added to the world's."""

    def __post_init__(self) -> None:
        if self.steps < 1 or self.groups_per_step < 1:
            raise ValueError("steps and groups_per_step must be at least 1")
        if self.minibatches < 1 or self.passes < 1:
            raise ValueError("minibatches and passes must be at least 1")
        _check_overrides(self.train)


class EvalConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[eval]`: held-out tasks, sampled at training temperature."""

    tasks: int = 0
    """Held-out tasks, dealt evenly over the environment's datasets; 0 takes all that it holds out."""

    no_tool_tasks: int = 0
    """Of these, how many are also tried with the tool host switched off; 0 leaves that out."""

    checkpoints: tuple[Literal["init", "sft", "preference", "rl"], ...] = ("sft", "preference", "rl")
    """The stages whose final weights are evaluated, where the run has them."""

    samples: int = 1
    """Of each task. Several tell pass@k and pass^k, and make intervals narrower where luck matters more than the task."""

    ks: tuple[int, ...] = ()
    """For which k pass@k and pass^k are told; at most `samples`."""

    every: int = 0
    """Evaluate after every so many steps of the rl stage too, beside training and without holding it up; 0: never."""

    every_tasks: int = 100
    """Held-out tasks of an evaluation beside training, the first of `tasks`; one sample each. 0 takes all of them."""

    max_lost: float = 0.05
    """Share of rollouts that infrastructure or judge may break, retries included; with more of them the evaluation has failed."""

    max_concurrent_rollouts: int = 128
    """Rollouts in flight."""

    def __post_init__(self) -> None:
        if min(self.tasks, self.no_tool_tasks, self.every, self.every_tasks) < 0:
            raise ValueError("tasks, no_tool_tasks, every and every_tasks must be 0 or more")
        if min(self.samples, self.max_concurrent_rollouts) < 1:
            raise ValueError("samples and max_concurrent_rollouts must be at least 1")
        if not all(1 <= k <= self.samples for k in self.ks) or len(set(self.ks)) != len(self.ks):
            raise ValueError(f"ks must be different numbers from 1 to samples = {self.samples}, got {list(self.ks)}")
        if not 0 <= self.max_lost <= 1:
            raise ValueError(f"max_lost must be a share from 0 to 1, got {self.max_lost}")


class ExportConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[export]`: a plain Hugging Face checkpoint folder."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the exported weights."""


def _check_overrides(keys: dict[str, int | float | str | bool]) -> None:
    """Refuse keys that `[train]` does not have, or values that it does not take; says where as msgspec does."""
    try:
        msgspec.convert(keys, TrainConfig, strict=True)
    except msgspec.ValidationError as error:
        raise ValueError(f"{error} - at `$.train`") from error
