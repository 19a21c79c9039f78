"""What a run is and what each stage does. Torch-free."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from sparring.algo.annotate.domain import ANY
from sparring.algo.loss.preference.config import ComparingLoss, DpoConfig, OrpoConfig, PreferenceLoss
from sparring.tasks.pools import DifficultyPools
from sparring.train.config import TrainConfig

MAX_THREADS = 1024
"""More than any one machine has a use for; the threading library ends the process where it cannot start them."""

NAMED = {("preference", "loss"): "dpo", ("reward_model", "loss"): "bradley_terry", ("rl", "preference"): "dpo"}
"""Tables of several kinds, and the kind of one that does not say its name; a name alone stands for a table of
defaults."""

StageName = Literal["init", "collect", "sft", "preference", "reward_model", "rl", "distill", "eval", "export"]


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

    after: tuple[str, ...] = ()
    """Recipes whose runs come first, in this order, but for those that are done: files, relative to where you stand.
    This one may name what they have written, such as teachers."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto`, `cpu` or `cuda`."""

    threads: int = 0
    """CPU threads of the trainer and of the engine each; 0 takes every core."""

    memory: Literal["refuse", "warn"] = "refuse"
    """What is done with a run that is said to need more memory than the machine has. warn: it is begun all the same;
    where it ends for want of memory, it says again what it had been told."""

    cluster: Literal["inline"] = "inline"
    """Which process runs where."""

    def __post_init__(self) -> None:
        if self.name in ("", ".", "..") or "/" in self.name or "\0" in self.name:
            raise ValueError(f"name must be one folder name, got {self.name!r}")
        if len(set(self.stages)) != len(self.stages):
            raise ValueError(f"stages must not repeat, got {list(self.stages)}")
        if not 0 <= self.threads <= MAX_THREADS:
            raise ValueError(f"threads must be 0 (all) to {MAX_THREADS}, got {self.threads}")


class CollectConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[collect]`: traces of a teacher on the environment's training tasks, sampled as `[rollout]` says, for the sft
    stage."""

    model: str = "teacher"
    """Who is asked: a name of `[models]`."""

    teachers: dict[str, str] = {}
    """Several in its place, by domain as in `[distill] teachers`."""

    tasks: int = 100
    """Training tasks, the first ones of the stream."""

    attempts: int = 1
    """Rollouts of each task."""

    min_reward: float = 1.0
    """Least reward of a rollout that is kept."""

    keep: int = 1
    """Most rollouts of one task that are kept, the first ones."""

    max_concurrent_rollouts: int = 32
    """Rollouts in flight."""

    def __post_init__(self) -> None:
        if min(self.tasks, self.attempts, self.keep, self.max_concurrent_rollouts) < 1:
            raise ValueError("tasks, attempts, keep and max_concurrent_rollouts must be at least 1")

    @property
    def by_domain(self) -> dict[str, str]:
        """Who is asked, by domain."""
        return self.teachers or {ANY: self.model}


class SftConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[sft]`: supervised fine-tuning on demonstrations, loss on assistant tokens only."""

    steps: int = 100
    """Optimiser steps."""

    rows_per_step: int = 64
    """Demonstrations per step, drawn in proportion to how many each dataset has."""

    train: dict[str, int | float | str | bool] = {}
    """Keys of `[train]` that this stage replaces, such as `learning_rate`."""

    data: str | None = None
    """A file of conversations (JSON Lines, Parquet, a datasets folder) with a `messages` column; None takes what the
    run's collect stage has gathered, or, where it has none, asks the world's expert."""

    def __post_init__(self) -> None:
        if self.steps < 1 or self.rows_per_step < 1:
            raise ValueError("steps and rows_per_step must be at least 1")
        _check_overrides(self.train)


class PreferenceConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[preference]`: the policy learns from replies that somebody compared or labelled."""

    data: str | None = None
    """A file (JSON Lines, Parquet, a datasets folder) of {prompt or messages, chosen, rejected}; with kto also of
    {prompt or messages, completion, label}."""

    held_out: int = 0
    """At least that many rows, whole prompts, are not trained but judged at the end; 0: none."""

    loss: PreferenceLoss = DpoConfig()
    """The algorithm, by `name`."""

    imitate: float | None = None
    """What the negative log-likelihood of chosen replies counts beside the loss; None: as papers have it, 1 with orpo,
    else 0."""

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
    """The chosen text is worth more (arXiv 2203.02155, equation 1).

        loss = -log sigmoid(r(chosen) - r(rejected) - margin) + centre * (r(chosen) + r(rejected))^2

    A reward model for whole replies, from compared ones.
    """

    centre: float = 0.0
    """What the square of the sum of a pair's rewards counts: holds rewards near zero (arXiv 2312.09244)."""

    def __post_init__(self) -> None:
        if self.centre < 0:
            raise ValueError(f"centre must be 0 or more, got {self.centre}")


class StepsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="name", tag="steps"):
    """Each step of a solution is right or not (arXiv 2305.20050).

        loss = -y * log sigmoid(v) - (1 - y) * log sigmoid(-v),    v the value behind the step, y its label

    A process reward model, from solutions whose steps were judged.
    """

    separator: str = "\n"
    """What stands between two steps."""


class TurnsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="name", tag="turns"):
    """Each turn of a conversation is right or not: `steps`, where a step is a whole reply, tool calls included.

        loss = -y * log sigmoid(v) - (1 - y) * log sigmoid(-v),    v the value behind the reply, y its label

    A process reward model for `[rl] reward_by = "turn"`, which asks it at the same places.
    """


class RewardModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[reward_model]`: a scalar head on the policy's weights learns what replies, or their steps, are worth."""

    data: str | None = None
    """A file of {prompt or messages, chosen, rejected, margin?}; with `steps` of {prompt or messages, steps, labels};
    with `turns` of {messages, labels}."""

    held_out: int = 0
    """At least that many rows, whole prompts, are not trained but judged at the end; 0: none."""

    loss: BradleyTerryConfig | StepsConfig | TurnsConfig = BradleyTerryConfig()
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


class CriticConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[rl.critic]`: a model that says before each token what is still earned, for credit gae; it learns beside the
    policy, of the same rollouts, in as many optimiser steps."""

    model: str = "policy"
    """The weights that it begins with: `policy`, those that the stage begins with; `reward_model`, what that stage of
    this run has written; or a name in `[models]`. A scalar head that is there stays; a new one begins at zero."""

    clip: float = 0.2
    """How far a value moves from the one before the update until it is no longer trained, in units of reward; 0:
    any."""

    warmup_steps: int = 0
    """The first updates of the stage, in which the critic alone learns (value pretraining, VC-PPO, arXiv
    2503.01491)."""

    train: dict[str, int | float | str | bool] = {}
    """Keys of `[train]` that the critic replaces, such as `learning_rate`; those of `[rl] train` are the policy's."""

    def __post_init__(self) -> None:
        if not 0 <= self.clip < math.inf or self.warmup_steps < 0:
            raise ValueError("clip and warmup_steps must be 0 or more")
        _check_overrides(self.train)


class ImplicitConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[rl.implicit]`: a language model whose log-probabilities, against those of the reference (`[algo.kl]
    reference`), are the process rewards of credit prime; it learns beside the policy which rollouts were right, in as
    many optimiser steps.

        loss = - mean_i (o_i log sigmoid(R_i) + (1 - o_i) log sigmoid(-R_i))
        R_i  = beta * sum_t (log p_implicit(y_i,t) - log p_reference(y_i,t))    o_i: 1 where rollout i was right

    Cui et al. (PRIME), arXiv 2502.01456, section 3."""

    model: str = "policy"
    """The weights that it begins with: `policy`, those that the stage begins with, or a name in `[models]`."""

    train: dict[str, int | float | str | bool] = {}
    """Keys of `[train]` that it replaces, such as `learning_rate`; those of `[rl] train` are the policy's."""

    def __post_init__(self) -> None:
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

    pools: DifficultyPools | None = None
    """Pass over tasks that the policy masters, or cannot do at all, with a probability. None: every task comes."""

    preference: ComparingLoss | None = None
    """Online preference optimisation in the place of `[algo]`: the best rollout of each group against its worst; the
    reference is what the stage begins with."""

    reward_model: str | None = None
    """Who scores rollouts beside the world: `reward_model`, what that stage of this run has written, or a name in
    `[models]`."""

    reward_weight: float = 1.0
    """What the reward model's rewards are multiplied with before they are added to the world's."""

    reward_by: Literal["reply", "turn", "step"] = "reply"
    """What the reward model judges. reply: the whole conversation, by its value. turn: every turn of the policy, by the
    probability that it is right, the sigmoid of the value behind it; step: every step of its turns likewise. Process
    rewards, for a credit that reads turns."""

    reward_separator: str = ""
    """What stands between two steps under `reward_by` = "step", with a reward model of `[models]`; empty: a line break.
    The run's own has it in `[reward_model] loss`."""

    observations: float = 0.0
    """Scale of a cross-entropy loss on the tokens that tools answered (ECHO, arXiv 2605.24517); 0: none."""

    critic: CriticConfig | None = None
    """What tells credit gae the values of states; None: nothing does."""

    implicit: ImplicitConfig | None = None
    """What tells credit prime the rewards of tokens; None: nothing does."""

    def __post_init__(self) -> None:
        if self.steps < 1 or self.groups_per_step < 1:
            raise ValueError("steps and groups_per_step must be at least 1")
        if self.critic is not None and self.critic.warmup_steps >= self.steps:
            raise ValueError(f"critic.warmup_steps must be below steps, got {self.critic.warmup_steps} of {self.steps}")
        if self.minibatches < 1 or self.passes < 1:
            raise ValueError("minibatches and passes must be at least 1")
        if self.reward_by != "reply" and self.reward_model is None:
            raise ValueError(f'reward_by = "{self.reward_by}" needs a reward_model that says what each is worth')
        if self.reward_separator and self.reward_by != "step":
            raise ValueError('reward_separator is for reward_by = "step" alone')
        if not 0 <= self.observations < math.inf or self.observations and self.preference is not None:
            raise ValueError(f"observations must be 0 or more, and 0 beside preference, got {self.observations}")
        _check_overrides(self.train)


class DistillConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[distill]`: on-policy distillation. The policy samples, and becomes what its teachers make of what it sampled.

    With q the policy's distribution in the place of a sampled token y, p the teacher's:

        over token        policy_gradient  advantage log p(y) - log q(y)      (Lu, On-Policy Distillation, 2025)
                          squared          (log q(y) - log p(y))^2 / 2
        over top_k or     reverse          KL(q || p)
        vocabulary        forward          KL(p || q)
                          jensen_shannon   beta KL(p || m) + (1 - beta) KL(q || m), m = beta p + (1 - beta) q
                                           (GKD, arXiv 2306.13649, section 2)

    top_k is over the teacher's likeliest tokens and, as one outcome, all others.
    """

    steps: int = 100
    """Optimiser steps."""

    groups_per_step: int = 16
    """Tasks per step; `[rollout] group_size` rollouts of each."""

    train: dict[str, int | float | str | bool] = {}
    """Keys of `[train]` that this stage replaces, such as `learning_rate`."""

    teachers: dict[str, str] = {}
    """Teachers by domain: the tag of a task, else its environment, else "*" for all that no other is for; each the name
    of a model, as in { "*" = "teacher" } with [models.teacher]."""

    over: Literal["token", "top_k", "vocabulary"] = "token"
    """What is compared in the place of each sampled token: the log-probabilities of that token alone; the teacher's
    `top_k` likeliest tokens and the rest as one; or the whole distributions, the teachers computed beside the
    trainer."""

    divergence: Literal["reverse", "forward", "jensen_shannon"] = "reverse"
    """reverse: KL(student || teacher); forward: KL(teacher || student); jensen_shannon: of `beta` (GKD, arXiv
    2306.13649). The sampled token alone knows the reverse one only."""

    beta: float = 0.5
    """jensen_shannon = beta KL(teacher || mixture) + (1 - beta) KL(student || mixture), of which beta is the teacher's
    share."""

    top_k: int = 32
    """Likeliest tokens of the teacher, under `over` = "top_k"."""

    estimator: Literal["policy_gradient", "squared"] = "policy_gradient"
    """Under `over` = "token": the teacher's log-probability minus the student's as the advantage of each token; or half
    its square as a loss. Their gradients are equal where the weights that are trained sampled the token."""

    ratio_cap: float = 2.0
    """Largest weight of a token that older weights sampled, under `estimator` = "policy_gradient"."""

    tokenizers: Literal["same", "any"] = "same"
    """any: what the student said is said to a teacher in the teacher's own tokens, and compared wherever a token of
    both ends; for `over` = "token"."""

    feedback: Literal["none", "sibling"] = "none"
    """sibling: the teacher is shown a successful rollout of the same task and reads what the student wrote without it
    (SDPO, arXiv 2601.20802); it may then be the policy itself, "policy" as its engine serves it at that time, or
    "average". A rollout whose group has no other success teaches nothing."""

    decay: float = 0.95
    """Of the teacher "average", the moving average of the policy, which begins as the policy does: after every update
    average = decay * average + (1 - decay) * policy (SDPO's regularised teacher)."""

    observations: float = 0.0
    """Scale of a cross-entropy loss on the tokens that tools answered (ECHO, arXiv 2605.24517); 0: none."""

    aggregation: Literal["token_mean", "sequence_mean"] = "token_mean"
    """token_mean: every token counts the same; sequence_mean: every trajectory does."""

    max_concurrent_scores: int = 64
    """Requests to teachers under way at once."""

    retries: int = 2
    """How often a request is repeated that a teacher failed to answer."""

    retry_delay_s: float = 0.5
    """Pause before the first repetition; doubles with each."""

    def __post_init__(self) -> None:
        if self.steps < 1 or self.groups_per_step < 1 or self.max_concurrent_scores < 1:
            raise ValueError("steps, groups_per_step and max_concurrent_scores must be at least 1")
        if not 0 < self.decay < 1:
            raise ValueError(f'decay must lie between 0 and 1, got {self.decay}; at 0 it is the teacher "policy"')
        if not 0 < self.beta < 1:
            raise ValueError(f"beta must lie between 0 and 1, got {self.beta}; its ends are forward and reverse")
        if self.over == "token" and self.divergence != "reverse":
            raise ValueError(
                f'divergence must be reverse where over is "token", got {self.divergence}; or compare over top_k'
            )
        if self.tokenizers == "any" and (self.over != "token" or self.feedback != "none"):
            raise ValueError(
                'tokenizers = "any" needs over = "token" and feedback = "none": only text is the same for both'
            )
        if self.feedback != "none" and self.over == "vocabulary":
            raise ValueError(
                'feedback needs over = "token" or "top_k": the teacher reads another text than the student'
            )
        if not 0 <= self.observations < math.inf:
            raise ValueError(f"observations must be 0 or more, got {self.observations}")
        if self.top_k < 1:
            raise ValueError(f"top_k must be at least 1, got {self.top_k}")
        if not self.ratio_cap >= 1:
            raise ValueError(f"ratio_cap must be at least 1, the weight of equal probabilities, got {self.ratio_cap}")
        if self.retries < 0 or self.retry_delay_s < 0:
            raise ValueError("retries and retry_delay_s must be 0 or more")
        _check_overrides(self.train)


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
    """The stages whose final weights are evaluated, where the run has them."""

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
