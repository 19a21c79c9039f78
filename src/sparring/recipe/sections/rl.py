"""`[rl]`: reinforcement learning over live rollouts, and what learns beside the policy."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from sparring.algo.loss.preference.config import ComparingLoss
from sparring.recipe.sections.overrides import TrainOverrides
from sparring.recipe.sections.stop import StopConfig
from sparring.tasks.pools import DifficultyPools


class CriticConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[rl.critic]`: a model that says before each token what is still earned, for credit gae; it learns beside the
    policy, of the same rollouts, in as many optimiser steps."""

    model: str = "policy"
    """The weights that it begins with: `policy`, those that the stage begins with; `reward_model`, what that stage of
    this run has written; or a name in `[models]`. A scalar head that is there stays; a new one begins at zero."""

    clip: float = 0.2
    """Largest change of a value in an update, in units of reward; beyond it the value is no longer trained. 0:
    unlimited."""

    warmup_steps: int = 0
    """The first updates of the stage, in which the critic alone learns (value pretraining, VC-PPO, arXiv
    2503.01491)."""

    train: TrainOverrides = {}
    """Keys of `[train]` that the critic replaces, such as `learning_rate`; those of `[rl] train` are the policy's."""

    def __post_init__(self) -> None:
        if not 0 <= self.clip < math.inf or self.warmup_steps < 0:
            raise ValueError("clip and warmup_steps must be 0 or more")


class ImplicitConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[rl.implicit]`: a language model whose log-probabilities, against those of the reference (`[algo.kl]
    reference`), are the process rewards of credit prime; it learns beside the policy which rollouts were right, in as
    many optimiser steps.

        loss = - mean_i (o_i log sigmoid(R_i) + (1 - o_i) log sigmoid(-R_i))
        R_i  = beta * sum_t (log p_implicit(y_i,t) - log p_reference(y_i,t))    o_i: 1 where rollout i was right

    Cui et al. (PRIME), arXiv 2502.01456, section 3."""

    model: str = "policy"
    """The weights that it begins with: `policy`, those that the stage begins with, or a name in `[models]`."""

    train: TrainOverrides = {}
    """Keys of `[train]` that it replaces, such as `learning_rate`; those of `[rl] train` are the policy's."""


class RlConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[rl]`: reinforcement learning over live rollouts."""

    steps: int = 100
    """Updates: each is made of fresh groups and publishes weights."""

    groups_per_step: int = 16
    """Tasks per step."""

    train: TrainOverrides = {}
    """Keys of `[train]` that this stage replaces, such as `learning_rate`."""

    stop: StopConfig | None = None
    """End before the last step. None: all steps are done."""

    minibatches: int = 1
    """Optimiser steps that a pass over a step's groups is made of; weights are published after the last."""

    passes: int = 1
    """Passes over every sampled token before its weights are published."""

    pools: DifficultyPools | None = None
    """Pass over tasks that the policy masters, or cannot do at all, with a probability. None: every task comes."""

    preference: ComparingLoss | None = None
    """Online preference optimisation in the place of `[algo]`: the best rollout of each group against its worst; the
    reference is what the stage begins with."""

    reward_model: str | None = None
    """Reward model that scores rollouts beside the environment: `reward_model`, the one that this run's stage of that
    name has trained, or a name in `[models]`."""

    reward_weight: float = 1.0
    """Factor of the reward model's rewards before they are added to the environment's."""

    reward_by: Literal["reply", "turn", "step"] = "reply"
    """Text that the reward model judges. reply: the whole conversation, by its value. turn: every turn of the policy,
    by the probability that it is right, the sigmoid of the value behind it; step: every step of its turns likewise.
    Turn and step give process rewards, for a credit that reads turns."""

    reward_separator: str = ""
    """Text between two steps under `reward_by` = "step", with a reward model of `[models]`; empty: a line break. The
    run's own has it in `[reward_model] loss`."""

    observations: float = 0.0
    """Scale of a cross-entropy loss on the tokens that tools answered (ECHO, arXiv 2605.24517); 0: none."""

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
