"""All uses of models, for stages, memory estimates, resume and checks. A new use is its own file and one line here."""

from __future__ import annotations

from collections.abc import Sequence

from sparring.model.hub import model_folder
from sparring.recipe.run_config import RunConfig
from sparring.stages.models.critic import CriticUse
from sparring.stages.models.implicit import ImplicitUse
from sparring.stages.models.judge import JudgeUse
from sparring.stages.models.learner import Learner
from sparring.stages.models.model_use import ModelUse, UsedModel
from sparring.stages.models.player import PlayerUse
from sparring.stages.models.policy import PolicyUse
from sparring.stages.models.reference import ReferenceUse
from sparring.stages.models.reward_model import RewardModelUse
from sparring.stages.models.teacher import TeacherUse

USES: list[ModelUse] = [
    PolicyUse(),
    ImplicitUse(),
    CriticUse(),
    RewardModelUse(),
    JudgeUse(),
    TeacherUse(),
    PlayerUse(),
    ReferenceUse(),
]
"""Uses in the order of their checks, the policy's first."""


def used_models(config: RunConfig, *stages: str) -> list[UsedModel]:
    """Return the models that stages compute in the processes of a run, stage by stage, the policy first."""
    return [one for stage in stages for use in USES for one in use.models(config, stage)]


def trained_models(config: RunConfig, *stages: str) -> dict[str, UsedModel]:
    """Return the models that stages train, by use."""
    return {one.use: one for one in used_models(config, *stages) if one.kind == "trained"}


def learners(config: RunConfig) -> Sequence[Learner]:
    """Return the uses of models that learn in addition to the policy in the rl stage."""
    return [use for use in USES if isinstance(use, Learner) and use.section(config) is not None]


def teachers_of(config: RunConfig, stage: str, trainer: str) -> tuple[dict[str, str | None], dict[str, float]]:
    """Return the frozen models that the trainer of a use computes in a stage, as `teachers` and `averages` of its
    `TrainPlan`."""
    frozen = [one for one in used_models(config, stage) if one.trainer == trainer]
    own = {one.model for one in frozen if one.model == trainer or one.decay is not None}
    folders = {one.model: None if one.model in own else str(model_folder(config.models[one.model])) for one in frozen}
    return folders, {one.model: one.decay for one in frozen if one.decay is not None}
