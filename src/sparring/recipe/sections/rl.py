"""`[rl]`: reinforcement learning over live rollouts, with critic and implicit reward model."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from sparring.algo.preference_rules import ComparingLoss
from sparring.recipe.sections.overrides import TrainOverrides
from sparring.recipe.sections.stop import StopConfig
from sparring.tasks.pools import DifficultyPools


class CriticConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[rl.critic]`: value model for credit gae, which predicts the remaining reward before each token. It learns from
    the policy's rollouts, in as many optimiser steps as the policy."""

    model: str = "policy"
    """Initial weights: `policy`, the weights at the start of the stage; `reward_model`, the output of this run's stage
    reward_model; or a name in `[models]`. An existing scalar head is kept; a new one starts at zero."""

    clip: float = 0.2
    """Maximum change of a value in an update, in units of reward; beyond it the value is not trained. 0: unlimited."""

    warmup_steps: int = 0
    """Number of first updates in which only the critic learns (value pretraining, VC-PPO, arXiv 2503.01491)."""

    train: TrainOverrides = {}
    """Keys of `[train]` that the critic replaces, such as `learning_rate`; `[rl] train` is the policy's."""

    def __post_init__(self) -> None:
        if not 0 <= self.clip < math.inf or self.warmup_steps < 0:
            raise ValueError("clip and warmup_steps must be 0 or more")


class ImplicitConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[rl.implicit]`: implicit reward model for credit prime: its log-probabilities minus the reference's (`[algo.kl]
    reference`) are process rewards. It learns from the policy's rollouts which of them were right, in as many optimiser
    steps as the policy.

        loss = - mean_i (o_i log sigmoid(R_i) + (1 - o_i) log sigmoid(-R_i))
        R_i  = beta * sum_t (log p_implicit(y_i,t) - log p_reference(y_i,t))    o_i: 1 where rollout i was right

    Cui et al. (PRIME), arXiv 2502.01456, section 3."""

    model: str = "policy"
    """Initial weights: `policy`, the weights at the start of the stage, or a name in `[models]`."""

    train: TrainOverrides = {}
    """Keys of `[train]` that this model replaces, such as `learning_rate`; `[rl] train` is the policy's."""


class RlConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[rl]`: reinforcement learning over live rollouts."""

    steps: int = 100
    """Number of updates; each uses fresh groups and publishes weights."""

    groups_per_step: int = 16
    """Number of tasks per step."""

    train: TrainOverrides = {}
    """Keys of `[train]` that this stage replaces, such as `learning_rate`."""

    stop: StopConfig | None = None
    """Early stopping. None: all steps are done."""

    minibatches: int = 1
    """Number of optimiser steps per pass over a step's groups; weights are published after the last."""

    passes: int = 1
    """Number of passes over a step's tokens before its weights are published."""

    pools: DifficultyPools | None = None
    """Pools of tasks that the policy always or never solves, which may be skipped. None: no task is skipped."""

    preference: ComparingLoss | None = None
    """Online preference optimisation instead of `[algo]`: the best rollout of each group against its worst, with the
    weights at the start of the stage as the reference."""

    reward_model: str | None = None
    """Reward model that scores rollouts in addition to the environment: `reward_model`, the output of this run's stage
    reward_model, or a name in `[models]`."""

    reward_weight: float = 1.0
    """Factor of the reward model's rewards, which are added to the environment's."""

    reward_by: Literal["reply", "turn", "step"] = "reply"
    """Unit that the reward model scores. reply: the whole conversation, by its value. turn: every turn of the policy,
    by the probability that it is right, which is the sigmoid of the value after it. step: every step of these turns, in
    the same way. turn and step give process rewards, for a credit rule that uses rewards of turns."""

    reward_separator: str = ""
    """Text between two steps under `reward_by` = "step", with a reward model of `[models]`; empty: a line break. For
    the run's own reward model, `[reward_model] loss` has the text."""

    observations: float = 0.0
    """Weight of a cross-entropy loss on the tokens of tool answers (ECHO, arXiv 2605.24517); 0: none."""

    critic: CriticConfig | None = None
    """Critic, which gives credit gae the values of states; None: no critic."""

    implicit: ImplicitConfig | None = None
    """Implicit reward model, which gives credit prime the rewards of tokens; None: no such model."""

    def __post_init__(self) -> None:
        if self.steps < 1 or self.groups_per_step < 1:
            raise ValueError("steps and groups_per_step must be at least 1")
        if self.critic is not None and self.critic.warmup_steps >= self.steps:
            raise ValueError(f"critic.warmup_steps must be below steps, got {self.critic.warmup_steps} of {self.steps}")
        if self.minibatches < 1 or self.passes < 1:
            raise ValueError("minibatches and passes must be at least 1")
        if self.reward_by != "reply" and self.reward_model is None:
            raise ValueError(f'reward_by = "{self.reward_by}" needs a reward_model that scores each')
        if self.reward_separator and self.reward_by != "step":
            raise ValueError('reward_separator must be left out unless reward_by = "step"')
        if not 0 <= self.observations < math.inf or self.observations and self.preference is not None:
            raise ValueError(f"observations must be 0 or more, and 0 with preference, got {self.observations}")
