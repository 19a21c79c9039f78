"""The rl stage: reinforcement learning over live multi-turn rollouts. `stages/runtime/online.py` has the training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sparring.algo.annotate.kl import KlCoefficient
from sparring.annotations import Annotation
from sparring.batch.batches import Plan
from sparring.batch.critic import value_rows
from sparring.batch.implicit import implicit_rows
from sparring.model.hub import model_folder
from sparring.protocols import TrainPlan
from sparring.recipe.run_config import RunConfig
from sparring.stages.context import POLICY, Context
from sparring.stages.models.annotators import annotators
from sparring.stages.models.critic import CRITIC, critic_folder, open_critic
from sparring.stages.models.implicit_reward import IMPLICIT, open_implicit
from sparring.stages.models.objective import credit_chosen, imitation_scale, preference_loss
from sparring.stages.models.reference import reference_teachers
from sparring.stages.models.written import write_model
from sparring.stages.runtime.online import OnlineObjective, OnlineTraining
from sparring.stages.runtime.raised import rl_optimiser_steps
from sparring.stages.runtime.training_tasks import training_tasks

STAGE = "rl"
ANNOTATIONS = frozenset({Annotation.REFERENCE, Annotation.VALUE, Annotation.IMPLICIT, Annotation.PROBABILITY_SQUARES})
"""Annotations that the stage can write for a credit rule."""


async def run(context: Context) -> dict[str, Any]:
    """Train the stage's input and write a Hugging Face folder, or an adapter's.

    Returns:
        The result of `OnlineTraining.train`, and the folder of each other trained model by its role: `critic`,
        `implicit`.
    """
    config, cluster = context.config, context.cluster
    total_steps = rl_optimiser_steps(config, context.store)
    training = OnlineTraining(context, STAGE, config.rl, _losses(config, total_steps))
    context.sink.event(STAGE, correction_chosen(config))
    folders: dict[str, Path] = {}
    if (critic := config.rl.critic) is not None:
        folders[CRITIC] = critic_folder(context, critic.model, training.source)
        training.add(CRITIC, open_critic(critic, cluster, folders[CRITIC], total_steps))
    if (implicit := config.rl.implicit) is not None:
        folders[IMPLICIT] = training.source if implicit.model == POLICY else model_folder(config.models[implicit.model])
        scale = config.algo.credit.implicit_scale
        training.add(IMPLICIT, open_implicit(implicit, scale, cluster, folders[IMPLICIT], total_steps))
    coefficient = KlCoefficient(config.algo.adaptive)
    objective = OnlineObjective(
        tasks=training_tasks(config, context.factory, config.rl.pools, drops_equal=config.algo.zero_variance_filter),
        annotators=annotators(config, training.trainers, coefficient),
        credit=credit_chosen(config),
        plan=_plan(config),
        kept={"kl": coefficient},
        metrics=coefficient.metrics,
        baseline=config.rl.preference is None and config.algo.credit.needs_baselines,
    )
    result = await training.train(objective)
    for role, folder in folders.items():
        out = context.folder / STAGE / role
        await write_model(training.trainers[role], folder, out)
        result[role] = str(out)
    return result


def _plan(config: RunConfig) -> Plan:
    critic = config.rl.critic
    learners = {CRITIC: (critic, value_rows), IMPLICIT: (config.rl.implicit, implicit_rows)}
    return Plan(
        minibatches=config.rl.minibatches,
        passes=config.rl.passes,
        seed=config.run.seed,
        idle_rows=config.algo.needs_idle_rows,
        whole_trajectories=config.algo.unit == "sequence",
        learners={role: rows for role, (section, rows) in learners.items() if section is not None},
        warmup_steps=0 if critic is None else critic.warmup_steps,
    )


def _losses(config: RunConfig, total_steps: int) -> TrainPlan:
    from sparring.algo.loss.imitate import ImitateLoss
    from sparring.algo.loss.policy import PolicyLoss

    loss = preference_loss(config) or PolicyLoss(config.algo)
    scale, (teachers, averages) = imitation_scale(config), reference_teachers(config)
    losses = [loss, *([ImitateLoss(scale=scale)] if scale else [])]
    return TrainPlan(
        losses=losses, total_steps=total_steps, overrides=config.rl.train, teachers=teachers, averages=averages
    )


def correction_chosen(config: RunConfig) -> str:
    """Return a sentence that names the correction of a resolved recipe and the reason for it."""
    numerics = config.models[POLICY].numerics
    engine = f"engine {config.engine.kind} in {numerics} numerics"
    exact = config.engine.exact and numerics == "exact"
    agrees = "samples with the trainer's own probabilities" if exact else "does not agree with the trainer to the bit"
    return f"correction {config.algo.correction_rule.in_words()}: {engine} {agrees}"
