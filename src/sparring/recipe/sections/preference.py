"""`[preference]` and `[reward_model]`: learning from preferences."""

from __future__ import annotations

import msgspec

from sparring.algo.loss.preference.dpo import Dpo
from sparring.algo.preference_rules import PreferenceLoss
from sparring.algo.rare.preference.orpo import Orpo
from sparring.recipe.sections.overrides import TrainOverrides

NAMED = {("preference", "loss"): "dpo", ("reward_model", "loss"): "bradley_terry", ("rl", "preference"): "dpo"}
"""Tables of several kinds, each with its default kind. The name of a kind in place of the table stands for the kind's
defaults."""


class PreferenceConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[preference]`: training of the policy on compared or labelled replies."""

    data: str | None = None
    """File (JSON Lines, Parquet, a datasets folder) of {prompt or messages, chosen, rejected}; with kto also of {prompt
    or messages, completion, label}."""

    held_out: int = 0
    """Minimum number of rows kept for evaluation at the end; all rows of a prompt stay together. 0: none."""

    loss: PreferenceLoss = Dpo()
    """Loss, by `name`."""

    imitate: float | None = None
    """Weight of the negative log-likelihood of chosen replies in addition to the loss; None: the papers' value, 1 with
    orpo, else 0."""

    steps: int = 100
    """Number of optimiser steps."""

    rows_per_step: int = 64
    """Number of pairs per step; labelled replies with kto."""

    train: TrainOverrides = {}
    """Keys of `[train]` that this stage replaces, such as `learning_rate`."""

    @property
    def imitates(self) -> float:
        """Weight of the negative log-likelihood, with the default resolved."""
        return float(isinstance(self.loss, Orpo)) if self.imitate is None else self.imitate

    def __post_init__(self) -> None:
        if self.steps < 1 or self.rows_per_step < 1 or self.held_out < 0:
            raise ValueError("steps and rows_per_step must be at least 1, held_out not below 0")
        if self.imitates < 0:
            raise ValueError(f"imitate must be 0 or more, got {self.imitate}")
        if isinstance(self.loss, Orpo) and not self.imitates:
            raise ValueError("imitate must be above 0 with orpo, whose loss has no other likelihood term; leave it out")


class BradleyTerryConfig(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="name", tag="bradley_terry"
):
    """Bradley-Terry loss: the chosen text has the higher reward (arXiv 2203.02155, equation 1).

        loss = -log sigmoid(r(chosen) - r(rejected) - margin) + centre * (r(chosen) + r(rejected))^2

    This loss trains a reward model of whole replies on compared replies.
    """

    centre: float = 0.0
    """Weight of the squared sum of a pair's rewards, which keeps rewards near zero (arXiv 2312.09244)."""

    def __post_init__(self) -> None:
        if self.centre < 0:
            raise ValueError(f"centre must be 0 or more, got {self.centre}")


class StepsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="name", tag="steps"):
    """Binary cross-entropy on each step of a solution (arXiv 2305.20050).

        loss = -y * log sigmoid(v) - (1 - y) * log sigmoid(-v),    v the value after the step, y its label

    This loss trains a process reward model on solutions with labelled steps.
    """

    separator: str = "\n"
    """Text between two steps."""


class TurnsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="name", tag="turns"):
    """Binary cross-entropy on each turn of a conversation: `steps` with whole replies as steps, tool calls included.

        loss = -y * log sigmoid(v) - (1 - y) * log sigmoid(-v),    v the value after the reply, y its label

    This loss trains a process reward model for `[rl] reward_by = "turn"`, which reads the values at the same positions.
    """


class RewardModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[reward_model]`: training of a scalar head on the policy's weights to predict rewards of replies or their
    steps."""

    data: str | None = None
    """File of {prompt or messages, chosen, rejected, margin?}; with `steps` of {prompt or messages, steps, labels};
    with `turns` of {messages, labels}."""

    held_out: int = 0
    """Minimum number of rows kept for evaluation at the end; all rows of a prompt stay together. 0: none."""

    loss: BradleyTerryConfig | StepsConfig | TurnsConfig = BradleyTerryConfig()
    """Loss of the reward model, by `name`."""

    steps: int = 100
    """Number of optimiser steps."""

    rows_per_step: int = 64
    """Number of rows of `data` per step."""

    train: TrainOverrides = {}
    """Keys of `[train]` that this stage replaces, such as `learning_rate`."""

    def __post_init__(self) -> None:
        if self.steps < 1 or self.rows_per_step < 1 or self.held_out < 0:
            raise ValueError("steps and rows_per_step must be at least 1, held_out not below 0")
