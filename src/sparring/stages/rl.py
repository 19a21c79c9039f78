"""The rl stage: reinforcement learning over live multi-turn rollouts. `stages/runtime/online.py` has the training."""

from __future__ import annotations

from typing import Any

from sparring.algo.annotate.kl import KlCoefficient
from sparring.batch.batches import Plan
from sparring.protocols import TrainPlan
from sparring.recipe.run_config import RunConfig
from sparring.stages.context import POLICY, Context
from sparring.stages.models.annotators import annotators
from sparring.stages.models.objective import credit_chosen, imitation_scale, preference_loss
from sparring.stages.models.uses import learners, teachers_of
from sparring.stages.models.weight_files import write_model
from sparring.stages.runtime.online import OnlineObjective, OnlineTraining
from sparring.stages.runtime.step_extension import rl_optimiser_steps
from sparring.stages.runtime.training_tasks import training_tasks

STAGE = "rl"


async def run(context: Context) -> dict[str, Any]:
    """Train the stage's input and write a Hugging Face or adapter folder.

    Returns:
        The result of `OnlineTraining.train`, and the folder of each other trained model by its use: `critic`,
        `implicit`.
    """
    config = context.config
    total_steps = rl_optimiser_steps(config, context.store)
    training = OnlineTraining(context, STAGE, config.rl, _losses(config, total_steps))
    context.sink.event(STAGE, correction_chosen(config))
    folders = {learner.name: learner.folder(context, training.source) for learner in learners(config)}
    for learner in learners(config):
        training.add(learner.name, learner.open(context, folders[learner.name], total_steps))
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
    for use, folder in folders.items():
        out = context.folder / STAGE / use
        await write_model(training.trainers[use], folder, out)
        result[use] = str(out)
    return result


def _plan(config: RunConfig) -> Plan:
    others = learners(config)
    return Plan(
        minibatches=config.rl.minibatches,
        passes=config.rl.passes,
        seed=config.run.seed,
        idle_rows=config.algo.needs_idle_rows,
        whole_trajectories=config.algo.unit == "sequence",
        learners={learner.name: learner.rows for learner in others},
        warmup_steps=max((learner.warmup_steps(config) for learner in others), default=0),
    )


def _losses(config: RunConfig, total_steps: int) -> TrainPlan:
    from sparring.algo.loss.imitate import ImitateLoss
    from sparring.algo.loss.policy import PolicyLoss

    loss = preference_loss(config) or PolicyLoss(config.algo)
    scale, (teachers, averages) = imitation_scale(config), teachers_of(config, STAGE, POLICY)
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
